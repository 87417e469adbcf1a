"""Presets: the name of a documented system stands for the policies of this project that come nearest to it.

A preset decides nothing itself: it is the text of a policy, scope included, that could be typed as well, beside what
the real system does otherwise. `NAME:key=value` sets an option of whatever in it declares one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A system by name. summary, differs: sentences; the first is shown in lists."""

    name: str
    policy: str  # as given: EVICT[:opts][+PREFETCH[:opts]][@SCOPE]
    summary: str
    differs: str  # what the real system does otherwise, and what stays unverified


PRESETS = (
    Preset(
        "pre-gated",
        "fifo+oracle:horizon=1",
        "Pre-gated MoE: every expert known exactly, one layer ahead.",
        "The real system (arXiv 2308.12066) retrains the model's gates to choose one block ahead, so what is an oracle "
        "on an ordinary model is knowledge there, at some cost in quality. It frees experts after their use and never "
        "hits across tokens, where FIFO keeps what fits. At the last layer this one looks on to the next token.",
    ),
    Preset(
        "specmd",
        "least-stale",
        "SpecMD: what the current pass has not touched goes first.",
        "The paper (arXiv 2602.03921) combines Least-Stale with several prefetchers: add one, as in "
        "least-stale+markov. Unverified: policies/retention/least_stale.py.",
    ),
    Preset(
        "brainstorm",
        "static",
        "BrainStorm: the experts that a profile found popular (needs profile=FOLDER).",
        "The real system preloads by the profile and keeps what it has; here the cache starts empty and admission is "
        "forced, so a missed expert takes the place of the least popular one.",
    ),
    Preset(
        "fiddler",
        "static",
        "Fiddler: the experts that a profile found popular (needs profile=FOLDER).",
        "The real system (arXiv 2402.07033) preloads by the profile, never evicts, and computes a miss on the CPU "
        "where that is cheaper (/split); here admission is forced, and every miss is moved to the GPU.",
    ),
    Preset(
        "eamc-code",
        "eamc:capacity=1000:split=false:source=request:layers=future:cosine=rows:threshold=-1"
        ":replacement=least-used:keep=most-visited",
        "MoE-Infinity's first public release, which is not what its paper prints.",
        "The release has 20 FIFO levels, demand on the first and every prefetch on the next, where they stay until "
        "they start; here each proposal replaces the queue (rule 4) and the highest priority starts "
        "first. It weighs a prefetch by 1 - distance / (L + 1), here / L; and in place of leaving out the rows up "
        "to the current layer it makes them uniform on both sides, which adds the same to every similarity. "
        "Unverified: its ties, and whether visits outlive an eviction. Later "
        "releases evict the least visited (keep=least-visited), and since 2025 predict and prefetch nothing for "
        "most models.",
    ),
    Preset(
        "eamc-v1",
        "eamc:cosine=rows:replacement=k-means",
        "MoE-Infinity as its first version has it: K-means, and the mean of the rows' cosines.",
        "The paper (arXiv 2401.14361v1) builds its collection from a data set beforehand, which is moe-sim eamc "
        "build; here it is also rebuilt whenever as many EAMs wait as it holds. The start of K-means is not stated "
        "there: here it is what is stored. What the first version leaves open is as in eamc.",
    ),
    Preset(
        "mixtral-offloading",
        "lru+gate@layer",
        "mixtral-offloading: LRU of each layer's own, and the next layer's gate applied early (needs lookahead).",
        "In the real system (arXiv 2312.17238) a swap also copies the victim back to the host; here eviction is "
        "free (rule 7). It fetches a fixed number of the speculated experts once the layer's own are there.",
    ),
    Preset(
        "adapmoe",
        "lru+gate@layer",
        "AdapMoE: slots per layer by dynamic programming (needs profile=FOLDER), next layer's gate (needs lookahead).",
        "The real system (arXiv 2408.10284) also activates fewer experts for tokens that bear it, predicts for the "
        "first layer of the coming token with a gate trained for it, and looks more layers ahead where there is time. "
        "Its dynamic programming weighs in how well each layer is predicted; here it minimises the misses of LRU "
        "without prefetch. Without a profile the slots are even. Unverified.",
    ),
    Preset(
        "finemoe",
        "expert-map",
        "FineMoE (fMoE): expert maps by trajectory, for what to keep and what to fetch.",
        "moe-sim policies expert-map has it (arXiv 2502.05370). That visits count from a run's start is unverified.",
    ),
    Preset(
        "in-depth",
        "lfu-aged+gate",
        "In-depth analysis: an LFU variant, and speculation by the next layer's gate (needs lookahead).",
        "That the paper's variant of LFU (arXiv 2511.05814) ages is unverified.",
    ),
    Preset(
        "hobbit",
        "multi-criteria+gate",
        "HOBBIT: recency, frequency and layer distance weighed, next layer's gate (needs lookahead).",
        "The real system (arXiv 2411.01433) keeps low-bit copies and computes with one where an unimportant expert "
        "misses, counts high-precision uses as a fourth criterion, and adapts how many layers it looks ahead; here "
        "all experts are of one precision and the gate looks one layer ahead. The weights are unverified.",
    ),
    Preset(
        "flashmoe",
        "lrfu",
        "FlashMoE, a stand-in: recency and frequency mixed by LRFU.",
        "The real system (arXiv 2601.17063) learns the mix of recency and frequency, and reads experts from an SSD; "
        "LRFU mixes them by a fixed decay, and experts come from host memory.",
    ),
    Preset(
        "llama-cpp-moe-cache",
        "lru",
        "llama.cpp's --moe-cache-mib: one LRU over the experts of the layers whose experts are in host memory.",
        "The real cache (llama.cpp b11480, src/llama-moe-cache.cpp) is split by layout: layers whose expert tensors "
        "differ in type or shape have slots of their own, each group the same share. Layers that are in GPU memory "
        "whole are not cached. Of the experts of one event those that hit count as older than those that were missed; "
        "here the lower id does. Batches of more than 32 tokens, such as prompts, only read it; here they fill it.",
    ),
    Preset(
        "llama-cpp-moe-cache-classlru",
        "class-lru",
        "llama.cpp's --moe-cache-mib of a later commit: ages weighed by classes of use (rebuilt).",
        "The real policy (llama.cpp c4fb579) was rebuilt from an excerpt of its source, which moe-sim policies "
        "class-lru says; all else is as in llama-cpp-moe-cache. Unverified.",
    ),
)
