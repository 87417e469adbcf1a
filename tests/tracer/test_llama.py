"""What llama.cpp shows of a GGUF file is what transformers routes with the same weights, to the last id."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: the extra `llama`")


from tests.support.architectures import tiny
from tests.support.command import Run
from tests.support.gguf_models import ARCHITECTURES, CHANGES, write_model
from tests.support.same import assert_same
from tracer import demo
from tracer.answers import LoadedModel
from tracer.llama import GgufModel
from tracer.loading import Loading
from tracer.models import load_model
from tracer.prompts import Columns, Prompt, read_prompts
from tracer.record import Options, record
from traces import Trace
from traces.reader import EXTRA

TEXTS = ("What is a heron?", "Hi", "Count the boats in the harbour, twice. " * 15)  # the last one takes three passes
PROMPTS = [Prompt(f"p{i}", "set", "task", (text,), ("so it is",)) for i, text in enumerate(TEXTS)]
TALK = Prompt("talk", "set", "task", ("Hello", "And now? <end>"), ("Yes", "No"))

TEMPLATE = (
    "{%- for m in messages %}\n    <{{ m.role }}>{{ m.content | tojson }}\n"
    "{%- if loop.last %}{% break %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<?>{% endif %}"
)


def made(architecture: str, **changes: Any) -> LoadedModel:
    return tiny(architecture, **{"max_position_embeddings": 2048, **CHANGES[architecture], **changes})


def opened(path: Path, loaded: LoadedModel, **written: Any) -> GgufModel:
    """The model as llama.cpp runs it, with keys and values in float32 as transformers has them."""
    return GgufModel(write_model(path / f"{loaded.name}.gguf", loaded, **written), Loading(dtype="float32", threads=1))


def recorded(loaded: Any, out: Path, prompts: list[Prompt] = PROMPTS, **options: Any) -> Trace:
    record(
        loaded,
        prompts,
        out,
        Options(**{"max_new_tokens": 8, "weights": True, "lookahead": "1,2,3", "scores": 6, **options}),
    )
    return Trace.read(out, EXTRA)


def assert_routed_alike(one: Trace, other: Trace) -> None:
    """Require all tokens, experts and their order to be equal: there are no ties among these random weights."""
    for name in ("offsets", "step", "phase", "position", "token_id", "experts", "lookahead", "candidates"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.weights is not None
    assert other.weights is not None
    np.testing.assert_allclose(one.weights.astype(float), other.weights.astype(float), atol=1e-3)
    for name in ("lookahead_scores", "scores"):
        np.testing.assert_allclose(getattr(one, name).astype(float), getattr(other, name).astype(float), atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mode", ["generate", "teacher-forced"])
def test_llama_cpp_routes_each_token_as_transformers_does(architecture: str, mode: str, tmp_path: Path) -> None:
    loaded = made(architecture)
    ours = recorded(loaded, tmp_path / "transformers", mode=mode)
    theirs = recorded(opened(tmp_path, loaded), tmp_path / "llama", mode=mode)
    assert_routed_alike(ours, theirs)
    sizes = ("layers", "experts", "top_k", "hidden_size", "expert_intermediate_size", "expert_matrices")
    assert [getattr(theirs.meta, size) for size in sizes] == [getattr(ours.meta, size) for size in sizes]
    assert len(set(theirs.experts.reshape(-1).tolist())) == ours.num_experts, "some experts are never chosen"


def test_trained_routing_is_recorded_as_transformers_has_it(tmp_path: Path) -> None:
    loaded = load_model(str(demo.MODEL), Loading(dtype="float32", device="cpu", threads=1))
    prompts = read_prompts(demo.PROMPTS, Columns(limit=3))
    ours = recorded(loaded, tmp_path / "transformers", prompts)
    assert_routed_alike(ours, recorded(opened(tmp_path, loaded), tmp_path / "llama", prompts))


def test_turns_are_asked_through_the_chat_template_of_the_file(tmp_path: Path) -> None:
    loaded = made("qwen3_moe")
    loaded.tokenizer.chat_template = TEMPLATE
    ours = recorded(loaded, tmp_path / "transformers", [TALK])
    assert_routed_alike(ours, recorded(opened(tmp_path, loaded), tmp_path / "llama", [TALK]))
    assert ours.token_id is not None
    assert bytes(ours.token_id[:17].tolist()) == b'    <user>"Hello"'


def test_tokens_are_drawn_by_the_seed_and_a_resumed_recording_is_the_whole(tmp_path: Path) -> None:
    loaded = opened(tmp_path, made("mixtral"))
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    whole = recorded(loaded, tmp_path / "whole", **drawn)
    options, steps = Options(max_new_tokens=8, weights=True, lookahead="1,2,3", scores=6, **drawn), 0

    def interrupt(rows: int) -> None:
        nonlocal steps
        steps += rows
        if steps == 12:  # in the second prompt
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(loaded, PROMPTS, tmp_path / "t", options, on_step=interrupt)
    record(loaded, PROMPTS, tmp_path / "t", options, resume=True)
    assert_same(whole, Trace.read(tmp_path / "t", EXTRA), EXTRA)
    other = recorded(loaded, tmp_path / "other", seed=1, **drawn)
    assert whole.token_id is not None
    assert other.token_id is not None
    assert not np.array_equal(whole.token_id, other.token_id)


def test_a_quantized_file_routes_nearly_as_its_original(tmp_path: Path) -> None:
    loaded = made("olmoe", hidden_size=64, intermediate_size=32)
    ours = recorded(loaded, tmp_path / "transformers", mode="teacher-forced")
    theirs = recorded(opened(tmp_path, loaded, quantized=True), tmp_path / "llama", mode="teacher-forced")
    assert theirs.meta.dtype == "q8_0"
    assert theirs.meta.expert_bytes == 3 * 64 * 32 * 34 // 32
    alike = (np.sort(ours.experts) == np.sort(theirs.experts)).all(-1).mean()
    assert 0.9 < alike < 1


def test_the_command_needs_no_torch_and_refuses_what_llama_cpp_cannot_show(tmp_path: Path, moe_trace: Run) -> None:
    path = write_model(tmp_path / "m.gguf", made("olmoe"))
    code = "import sys; sys.modules.update(torch=None, transformers=None); from tracer.commands import main; main()"
    asked = ("record", "--gguf", path, "--limit", "2", "--max-new-tokens", "4", "--threads", "1", "--out", "t")
    done = subprocess.run([sys.executable, "-c", code, *asked], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trace = Trace.read(tmp_path / "t")
    assert (trace.meta.model, trace.requests["output_tokens"].tolist()) == ("m", [4, 4])
    assert {"xllamacpp", "llama.cpp"} <= set(trace.meta.tools)
    for option in ("--batch-size=2", "--offload=disk", "--device=cuda"):
        ended = moe_trace("record", "--gguf", path, option, "--out", tmp_path / "u")
        assert (ended.returncode, (tmp_path / "u").exists()) == (2, False)
        assert option.partition("=")[0] in ended.stderr
