"""Anonymized traces: a secret word in any place that holds text is not in the file."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import instrument
from instrument import slim
from instrument.base.trace_marks import SLIM
from instrument.explain.slimming import known_words
from instrument.explain.slimming.known_words import VOCABULARY, is_all_known
from instrument.explain.slimming.names import StandIns

from .random_traces import DEVICE, RandomTrace
from .test_slim import complete, write

SECRETS = ("acme", "moonshot", "zanzibar", "555123456", "deadbeef42")

NAMES = {
    "cpu_op": [
        "aten::acme_secret",
        "aten::acmeadd",
        "c10d::acme",
        "vllm::acme",
        "torch::autograd::Acme",
        "fbgemm::moonshot",
        "AcmeSecretBackward0",
        "MoonshotFunctionBackward",
        "acme::mm",
        "aten::add.moonshot",
        "prims::ACME",
        "autograd::engine::evaluate_function: AcmeBackward0",
        "autograd::engine::evaluate_function: load acme data",
        "autograd::engine::evaluate_function: torch::autograd::CppNode<acme::Op>",
        "aten::/home/acme/x",
        "triton_poi_fused_acme_0",
        "acme data of zanzibar",
        "torch.distributed.ddp.reducer::acme_bucket",
        "torch::autograd::CppNode<(anonymous namespace)::MoonshotFunction>",
        "aten::mm5551234567",
        "Ácme",
        "al::ACMEop",
        "record_param_comms_acme",
        "aten::deadbeef42",
        "Optimizer.step#AcmeAdam.step",
        "quantized::zanzibar.acme",
    ],
    "user_annotation": [
        "nccl:acme",
        "gloo:all_reduce acme",
        "Optimizer.step#MoonshotAdam.step",
        "Optimizer.zero_grad#Acme.zero_grad",
        "enumerate(DataLoader)#_AcmeLoaderIter.__next__",
        "enumerate(DataLoader) of acme",
        "acme (dynamo_timed)",
        "Moonshot.acme (dynamo_timed)",
        "_compile.acme_inner",
        "compile_fx.<locals>.acme",
        "Torch-Compiled Region: 0/0 acme",
        "## forward:acme ##",
        "## wait_for_batch acme ##",
        "Iteration Start: acme",
        "PyTorch Profiler (acme)",
        "[acme]train_dataloader_next",
        "Python GC acme",
        "gc.collect(acme)",
        "acme (backward)",
        "/mnt/acme/zanzibar.parquet",
        "mail acme@moonshot.com",
        "step 5551234567",
        "triton_red_fused_acme_1",
        "aten::acme",
        "TorchDynamo Cache Lookup acme",
        "DistributedDataParallel.forward.acme",
    ],
    "python_function": [
        "torch/acme_secret/train.py(3): run",
        "torch/nn/acme.py(3): forward",
        "torch/nn/functional.py(3): acme_linear",
        "/home/acme/lib/site-packages/torch/nn/functional.py(3): linear",
        "vllm/acme/x.py(1): <acme>",
        "acme.py(1): __acme__",
        "/home/x/lib/site-packages/moonshot/net.py(3): zanzibar",
        r"C:\\Users\\acme\\train.py(1): moonshot",
        "acme",
        "transformers/models/moonshot/modeling_moonshot.py(9): forward",
        "torch/../acme.py(1): f",
        "json/acme.py(5): load",
        "threading.py(5551234567): acme",
        "nn.Module: AcmeBlock_4",
        "nn.Module: TransformerMoonshot_1",
        "<acme>(1): moonshot",
        "nn.Module: Linear_5551234567",
        "nn.Module: acme block",
        "<built-in method acme of Tensor object at 0xdeadbeef42>",
        "<built-in function acme>",
        "<built-in method add of moonshot.Tensor object at 0x1>",
        "<built-in acme>",
        "torch/_dynamo/acme/eval_frame.py(1): moonshot.<locals>.zanzibar",
        "torch/nn/functional.py(1): acme moonshot",
    ],
    "kernel": [
        "gemm_acme_secret_kernel",
        "void at::native::elementwise_kernel<acme::SecretOp>(int)",
        "void cutlass::Kernel<moonshot::Gemm>",
        "_ZN7cutlass6KernelIN8moonshot4GemmEEEvT_",
        "_ZN2at6nativeacmeEv",
        "_ZN4acme8moonshotEv",
        "_ZN2at6native20moonshotIf",
        "_ZN2at6native54_GLOBAL__N__deadbeef42_21_acme_cu_17e44f7d4acmeEv",
        "flash_fwd_kernel<moonshot>",
        "triton_poi_fused_acme_0",
        "sm80_xmma_acme",
        "sm80_xmma_gemm_acmef32_tn",
        "ampere_acme",
        "volta_moonshot",
        "turing_acme",
        "cublas_acme",
        "cudnn_acme",
        "nvjet_acme_128x64",
        "fmha_acme",
        "Cijk_Acme_MT16x16x16_MI16x16x1",
        "ncclDevKernel_acme",
        "rccl_acme",
        "deep_ep::moonshot",
        "deep_ep::intranode::dispatch<acme>",
        "acmegemm",
        "AcmeFlashAttentionMoonshot",
        "gemm/acme",
        "Memcpy HtoD (acme)",
        "Memset (acme)",
        "void acme<1>(moonshot*)",
        "ACME",
        "aCmE_kernel",
        "gemmAcmeGemm",
        "ácme gemm",
        "elementwise_kernel_5551234567",
        "deadbeef42",
        "std::enable_if<acme>::type internal::gemvx::kernel<int>",
        "acme.kd",
        "cuda::moonshot",
        "void (anonymous namespace)::acme()",
        "at::native::{lambda(acme)#1}",
        "splitKacme_kernel",
        "__amd_rocclr_acme",
    ],
    "cuda_runtime": [
        "cudaLaunch acme",
        "cudaAcmeSynchronize",
        "cuMoonshot",
        "hipAcmeLaunchKernel",
        "cudaLaunchKernel/acme",
        "ACME",
        "cudaStreamSynchronize(acme)",
        "runFunction - acme",
        "cudaGraphLaunch_5551234567",
        "EventMoonshot",
        "mtiaacme",
    ],
    "cuda_sync": ["Stream Wait acme", "Acme Sync", "Event Sync (moonshot)"],
    "gpu_user_annotation": ["acme gpu range", "nccl:moonshot"],
    "acme_category": ["Python GC in /home/acme", "acme"],
}


def hostile() -> dict[str, Any]:
    """Return a trace with secret words wherever it may hold text."""
    events: list[dict[str, Any]] = RandomTrace(7, steps=3).content["traceEvents"]
    at = 20_000.0
    for category, names in NAMES.items():
        for number, name in enumerate(names):
            args = {
                "device": 0,
                "stream": 7,
                "External id": number,
                "correlation": 90_000 + number,
                "acme": "acme",
            }
            events.append(complete(category, name, at, at + 0.5, 7 if "gpu" in category else 4711, args=args))
            at += 1
    text = {
        "Input Dims": [["acme"]],
        "Input type": ["c10::Acme", "float_acme", "acme"],
        "Concrete Inputs": ["5551234567"],
        "Sequence number": "acme",
        "Collective name": "all_reduce_acme",
        "Process Group Name": "moonshot",
        "dtype": "Float_acme",
        "grid": ["acme", 1, 1],
        "block": {"acme": "moonshot"},
        "stream": "acme",
        "device": 0,
        "In msg nelems": "acme",
        "External id": "acme",
        "bytes": "acme",
        "wait_on_stream": "acme",
    }
    events += [
        complete("cpu_op", "aten::mm", at, at + 1, args=text),
        complete("cpu_op", "aten::convolution", at + 1, at + 2, args=text),
        complete("kernel", "gemm", at + 2, at + 3, 7, args=text, bind_id="acme", flow_in="acme"),
        complete("cuda_sync", "Stream Wait Event", at + 2, at + 3, 7, args=text),
        complete("cpu_op", "aten::mm", at, at + 9)
        | {"pid": "acme host", "tid": "moonshot", "id": "acme", "cname": "acme"},
        complete("cpu_op", "aten::mm", at + 1, at + 19) | {"pid": "acme host", "tid": "moonshot"},
        {"ph": "i", "name": "acme", "cat": "acme", "pid": "acme", "tid": 1, "ts": at, "s": "acme"},
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "s": "acme", "args": text},
        {"ph": "C", "name": "acme counter", "pid": 1, "tid": 1, "ts": 1, "args": {"acme": 3, "moonshot": 4}},
        {"ph": "C", "name": "acme counter", "pid": 1, "tid": 1, "ts": at + 999, "args": {"acme": 3}},
        {"ph": "acme", "name": "acme", "pid": 1, "tid": 1, "ts": at},
        {"ph": "'acme\"", "name": "acme", "pid": 1, "tid": 1, "ts": at},
    ]
    for name in ("process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"):
        for place in ((4711, 4711), ("acme host", "moonshot"), (4711, 7)):
            args = {
                "name": "acme GPU",
                "labels": "moonshot",
                "sort_index": "acme",
                "acme": 1,
                "more": {"acme": "acme"},
            }
            events.append({"ph": "M", "name": name, "pid": place[0], "tid": place[1], "args": args})
    events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": ["acme"]}})
    lost = {
        "events": 3,
        "acme": 1,
        "bytes": "acme",
        "reasons": {"acme moonshot": 1, "events of phase 'acme' are not read": 2},
    }
    return {
        "displayTimeUnit": "acme",
        "schemaVersion": "acme",
        "traceName": "/home/acme/x.json",
        "acme": "acme",
        "record_shapes": "acme",
        "with_stack": {"acme": 1},
        "cuda_runtime_version": "12.4-acme",
        "instrument_steps": "acme",
        "baseTimeNanoseconds": "acme",
        "deviceProperties": [
            DEVICE | {"name": "NVIDIA A100 (acme moonshot)", "numSms": "acme", "acme": "acme"},
            {"id": 1, "name": "/dev/acme"},
            "acme",
        ],
        "distributedInfo": {
            "backend": "nccl:acme",
            "rank": "acme",
            "world_size": {"acme": 1},
            "acme": 1,
            "pg_config": [{"pg_name": "acme", "pg_desc": "acme", "pg_size": "acme", "ranks": ["acme"]}, "acme"],
        },
        SLIM: {
            "events": "acme",
            "acme": "acme",
            "lost": lost,
            "lanes": [["acme", 5, "acme"], "acme", ["acme"]],
            "steps": {"first": "acme", "acme": 1, "kept": 3, "of": 9},
        },
        "traceEvents": events,
    }


def found_secrets(path: Path) -> list[str]:
    text = gzip.decompress(path.read_bytes()).decode().lower()
    return [
        text[max(found.start() - 60, 0) : found.end() + 30]
        for secret in SECRETS
        for found in re.finditer("|".join((secret, secret[::-1])), text)
    ]


def test_hostile_names_are_many() -> None:
    """Each table has names with secrets in them."""
    assert sum(map(len, NAMES.values())) > 100
    texts = [text.lower().replace("á", "a") for names in NAMES.values() for text in names]
    assert [text for text in texts if not any(secret in text for secret in SECRETS)] == []


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("key", ["", "hush"])
def test_no_secret_stays(steps: int | None, key: str, tmp_path: Path) -> None:
    """No secret word is in the file, nor in that of a second time, and all numbers and findings stay."""
    path = write(tmp_path / "trace.json", hostile())
    made = slim(path, steps=steps, anonymize=True, key=key)
    again = slim(made.path, tmp_path / "again.json.gz", anonymize=True)
    assert found_secrets(made.path) == found_secrets(again.path) == []
    assert (made.changed, again.changed) == ((), ())
    assert json.loads(gzip.decompress(made.path.read_bytes()))


def test_each_hostile_name_becomes_another() -> None:
    """Different names have different stand-ins, so that no rows are joined."""
    names = StandIns()
    for category, texts in NAMES.items():
        table = {"cpu_op": "operators", "python_function": "frames", "kernel": "gpu", "cuda_runtime": "runtime"}
        assert len({names.event(table.get(category, "regions"), text) for text in texts}) == len(texts)


WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=6, max_size=12).filter(lambda word: not is_all_known(word))
CASES = st.sampled_from((str.lower, str.upper, str.title))
REAL = (
    ("operators", "aten::native_layer_norm_backward"),
    ("operators", "autograd::engine::evaluate_function: CudnnConvolutionBackward0"),
    ("operators", "torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction<&fbgemm_gpu::permute> >"),
    ("regions", "Optimizer.step#AdamW.step"),
    ("regions", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
    ("regions", "compile_fx.<locals>.fw_compiler_base (dynamo_timed)"),
    ("regions", "nccl:_all_gather_base"),
    ("gpu", "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)"),
    ("gpu", "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4"),
    ("gpu", "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1"),
    ("gpu", "_ZN2at6native54_GLOBAL__N__d8ceb000_21_DistributionNormal_cu_17e44f7d11elementwiseIfLi4EEvT_PKfS1_"),
    ("gpu", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ("gpu", "Memcpy HtoD (Pageable -> Device)"),
    ("gpu", "triton_red_fused_add_mean_mul_pow_rsqrt_0"),
    ("runtime", "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags"),
    ("frames", "torch/nn/modules/linear.py(124): forward"),
    ("frames", "nn.Module: MultiheadAttention_12"),
    ("frames", "<built-in method scaled_dot_product of PyCapsule object at 0x7f03c08c0270>"),
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(REAL), WORDS, CASES, st.sampled_from("_:<( /."), st.integers(0, 3), st.data())
def test_no_planted_word_stays(
    real: tuple[str, str], word: str, case: Callable[[str], str], sign: str, sides: int, data: st.DataObject
) -> None:
    """A word that is put anywhere into a real name, alone or as a part of another word, is not in its stand-in."""
    table, name = real
    place = data.draw(st.integers(0, len(name)))
    planted = name[:place] + sign * (sides & 1) + case(word) + sign * (sides >> 1) + name[place:]
    assert word not in StandIns().event(table, planted).lower()


def test_a_long_number_of_a_step_goes(tmp_path: Path) -> None:
    """A number that may identify something is no number of a step, and what this changes is said."""
    text = json.dumps(RandomTrace(3, steps=3).content).replace("ProfilerStep#", "ProfilerStep#555123456")
    made = slim(write(tmp_path / "trace.json", json.loads(text)), anonymize=True)
    assert found_secrets(made.path) == []
    assert "metric steps" in made.changed


def test_names_are_in_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a trace is cut and diagnosed, no file beside it has its names, so that a crash leaves none."""
    from instrument.explain.slimming import slim as module

    diagnose, seen = module.diagnose, list[str]()

    def watched(trace: Any) -> Any:
        for path in tmp_path.iterdir():
            content = path.read_bytes()
            content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
            seen.extend([path.name] * (b"acme" in content))
        return diagnose(trace)

    monkeypatch.setattr(module, "diagnose", watched)
    slim(write(tmp_path / "trace.json", hostile()), tmp_path / "out.json.gz", steps=2, anonymize=True)
    assert seen == ["trace.json"] * 2


def test_the_vocabulary() -> None:
    """The words are sorted, distinct, in lower case, and few."""
    words = VOCABULARY.read_text().splitlines()
    assert words == sorted(set(words))
    assert [word for word in words if not re.fullmatch(r"[a-z#]{1,20}", word)] == []
    assert VOCABULARY.stat().st_size < 60_000
    assert {"gemm", "addmm", "layer", "s#gemm", "synchronize", "autograd"} < set(words)
    assert not set(SECRETS) & set(words)


def test_the_vocabulary_is_read_for_stand_ins_alone(tmp_path: Path) -> None:
    """A plain slim trace does not need the words."""
    path = write(tmp_path / "trace.json", RandomTrace(1).content)
    known_words.vocabulary.cache_clear()
    slim(path)
    assert known_words.vocabulary.cache_info().currsize == 0
    slim(path, anonymize=True)
    assert known_words.vocabulary.cache_info().currsize == 1


def test_a_source_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a call, which only the source of the user has, is no number of the trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n\n\ndef main():\n    torch.cuda.synchronize()\n")
    events = [
        complete("user_annotation", "ProfilerStep#1", 0, 90_000),
        complete("user_annotation", "ProfilerStep#2", 90_000, 180_000),
    ]
    for begin in (0, 90_000):
        events += [
            complete("python_function", "train.py(4): main", begin + 1, begin + 80_000),
            complete("python_function", "torch/cuda/__init__.py(975): synchronize", begin + 9, begin + 60_000),
            complete("cuda_runtime", "cudaDeviceSynchronize", begin + 10, begin + 59_000),
            complete("cuda_runtime", "cudaLaunchKernel", begin + 2, begin + 4, args={"correlation": begin + 1}),
            complete("kernel", "gemm", begin + 5, begin + 58_000, 7, args={"correlation": begin + 1, "stream": 7}),
        ]
    path = write(tmp_path / "trace.json", {"traceEvents": events})
    assert any(found.where.site and found.where.site.line == 5 for found in instrument.diagnose(path).findings)
    assert slim(path, anonymize=True).changed == ()
