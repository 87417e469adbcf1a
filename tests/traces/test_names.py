"""Names of models as people, traces and publishers of GGUF files write them."""

import pytest

from traces import InputError
from traces.models.names import bytes_per_parameter
from traces.models.profile import known, model, shipped

FILES = """
bartowski/Qwen_Qwen3-30B-A3B-GGUF/Qwen_Qwen3-30B-A3B-Q4_K_M.gguf: qwen3-30b-a3b
Qwen_Qwen3-235B-A22B-Thinking-2507-Q4_K_L-00001-of-00004.gguf: qwen3-235b-a22b
Qwen_Qwen3-Coder-30B-A3B-Instruct-IQ4_XS.gguf: qwen3-30b-a3b
Qwen_Qwen3-VL-30B-A3B-Thinking-Q5_K_L.gguf: qwen3-30b-a3b
Qwen_Qwen3-Coder-Next-Q6_K_L-00001-of-00002.gguf: qwen3-next-80b-a3b
openai_gpt-oss-20b-MXFP4_MOE.gguf: gpt-oss-20b
zai-org_GLM-4.7-Flash-bf16-00001-of-00002.gguf: glm-4.7-flash
nvidia_Nemotron-3-Nano-30B-A3B-Q8_0.gguf: nemotron-3-nano-30b-a3b
baidu_ERNIE-4.5-21B-A3B-Thinking-Q4_K_M.gguf: ernie-4.5-21b-a3b
deepseek-ai_DeepSeek-V3.1-Base-Q4_0-00001-of-00010.gguf: deepseek-v3
DeepSeek-Coder-V2-Lite-Instruct-Q6_K_L.gguf: deepseek-v2-lite
unsloth/Qwen3-30B-A3B-GGUF: qwen3-30b-a3b
unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:UD-Q4_K_XL: qwen3-30b-a3b
Qwen3-30B-A3B-128K-UD-Q2_K_XL.gguf: qwen3-30b-a3b
Qwen3-Coder-480B-A35B-Instruct-1M-UD-IQ1_M-00001-of-00003.gguf: qwen3-coder-480b-a35b
UD-Q4_K_XL/Qwen3-235B-A22B-Instruct-2507-UD-Q4_K_XL-00001-of-00003.gguf: qwen3-235b-a22b
DeepSeek-R1-0528-UD-TQ1_0.gguf: deepseek-v3
DeepSeek-V3.1-Terminus-UD-IQ2_XXS-00001-of-00005.gguf: deepseek-v3
Kimi-K2-Instruct-0905-UD-Q2_K_XL-00001-of-00008.gguf: kimi-k2
Kimi-K2-Thinking-UD-TQ1_0-00001-of-00006.gguf: kimi-k2.5
GLM-4.6-UD-Q3_K_XL-00001-of-00004.gguf: glm-4.5
Llama-4-Scout-17B-16E-Instruct-UD-Q4_K_XL-00001-of-00002.gguf: llama-4-scout
NVIDIA-Nemotron-3-Super-120B-A12B-UD-Q4_K_XL-00001-of-00003.gguf: nemotron-3-super-120b-a12b
ggml-org/gpt-oss-20b-GGUF/gpt-oss-20b-mxfp4.gguf: gpt-oss-20b
ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF: qwen3-30b-a3b
lmstudio-community/gpt-oss-20b-GGUF/gpt-oss-20b-MXFP4.gguf: gpt-oss-20b
lmstudio-community/MiniMax-M2-GGUF/MiniMax-M2-Q4_K_M-00001-of-00004.gguf: minimax-m2
lmstudio-community/Qwen3-Next-80B-A3B-Instruct-MLX-4bit: qwen3-next-80b-a3b
mradermacher/Mixtral-8x7B-Instruct-v0.1-i1-GGUF: mixtral-8x7b
OLMoE-1B-7B-0924-Instruct.i1-Q4_K_M.gguf: olmoe-1b-7b
Qwen1.5-MoE-A2.7B-Chat.Q4_K_S.gguf: qwen1.5-moe-a2.7b
dots.llm1.inst.i1-IQ3_XS.gguf.part1of2: dots.llm1
qwen3:30b-a3b-q4_K_M: qwen3-30b-a3b
gpt-oss:120b: gpt-oss-120b
deepseek-ai/DeepSeek-V2-Lite-Chat: deepseek-v2-lite
GPT-OSS-20B: gpt-oss-20b
/models/Mixtral-8x7B-v0.1/: mixtral-8x7b
allenai/OLMoE-1B-7B-0125-Instruct: olmoe-1b-7b
Snowflake/snowflake-arctic-instruct: arctic
olmoe: olmoe-1b-7b
mixtral: mixtral-8x7b
Llama4-Scout: llama-4-scout
qwen3-coder-30b: qwen3-30b-a3b
"""


@pytest.mark.parametrize("line", FILES.strip().splitlines())
def test_names_of_publishers_files_name_their_model(line):
    name, wanted = line.rsplit(": ", 1)
    assert known(name) == model(name)
    assert model(name).name == wanted


@pytest.mark.parametrize(
    ("form", "precision"),
    [
        ("{owner}_{model}-Q4_K_M.gguf", "q4_k_m"),
        ("bartowski/{owner}_{model}-GGUF", ""),
        ("{model}-UD-Q4_K_XL-00001-of-00003.gguf", "q4_k_xl"),
        ("unsloth/{model}-GGUF:IQ2_XXS", "iq2_xxs"),
        ("{model}.i1-IQ3_XS.gguf", "iq3_xs"),
        ("{model}.Q8_0.gguf.part2of3", "q8_0"),
        ("{model}-FP8", "fp8"),
    ],
)
def test_every_shipped_model_is_known_as_publishers_name_its_files(form, precision):
    for profile in shipped():
        for hub_id in profile.hub_ids:
            owner, _, name = hub_id.rpartition("/")
            found = known(form.format(owner=owner, model=name))
            if profile.name == "gpt-oss-20b-bf16":  # a copy: its files are those of the original
                profile = model("gpt-oss-20b")
            assert found
            assert found.name == profile.name
            if precision and not profile.precisions:
                assert found.expert_bytes_per_parameter == bytes_per_parameter(precision)


@pytest.mark.parametrize(
    "name",
    [
        *("", "x", "model", "DeepSeek-R1-Distill-Qwen-32B-Q4_K_M.gguf", "Qwen3-8B", "qwen3", "q4_k_m.gguf"),
        *("deepseek", "granite-4.0-h-small", "qwen3.5"),
    ],
)
def test_other_models_are_not_taken_for_a_shipped_one(name):
    assert known(name) is None
    with pytest.raises(InputError, match=r"unknown model profile|no file at"):
        model(name)
