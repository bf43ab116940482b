"""Serve a tiny random Llama with vLLM, and record iterations of it on demand; needs a GPU."""

import argparse
import json
import tempfile
import time
from pathlib import Path

try:
    from vllm import LLM, SamplingParams
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. This script needs it: pip install vllm") from None

from instrument.integrations.vllm import attach

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 128,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [6, 7, 8, 9]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/vllm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(LLAMA))

        attach(options.out, warmup=0, active=6, file=folder / "trigger")  # the one line

        llm = LLM(
            name, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float16",
            max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=64 << 20,
        )  # fmt: skip
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, detokenize=False)
        for number in range(3):
            if number == 1:
                (folder / "trigger").touch()
                time.sleep(1)  # until it has been seen
            answers = llm.generate(PROMPTS, sampling, use_tqdm=False)
            print(f"round {number} tokens {[answer.outputs[0].token_ids for answer in answers]}")


if __name__ == "__main__":
    main()
