"""Writes src/instrument/explain/slimming/vocabulary.txt: the words of the public names of torch and its libraries.

``python -m scripts.vocabulary FOLDER`` reads the operators and the files of the installed packages, the calls of
CUDA and HIP, the names of kernels in the tests, and those of libraries in the traces in FOLDER (``make traces``
puts them into build/traces).
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.diagnosis import test_kinds as kinds
from tests.traces.test_kernel_names import NAMES
from torch.utils.hipify import cuda_to_hip_mappings as hipify

from instrument import TraceError, read_trace
from instrument.explain.slimming.known_words import VOCABULARY, pattern_of, words_of
from instrument.explain.waits.trace_context import FRAME, PACKAGES
from instrument.read.tables.kernel_names import parse
from instrument.read.tables.trace import MODULE_PREFIX

from .slim_page import samples

_CODE = re.compile(r"[a-f#]*#[a-f#]*#[a-f#]*|.*#elb#.*")  # a hash, or types in a mangled name
_MOST = 20  # letters of a word

# What the recordings of a library begin with. Names of other programs in the real traces are not taken.
_LIBRARY = re.compile(
    r"(?:void |std::enable_if<[^@]{0,200}>::type )?(?:\(anonymous namespace\)::|internal::)?"
    r"(?:at::|at_cuda_detail::|aten::|c10::|c10d::|prims::|cutlass|cublas|cudnn|cub::|thrust::|cask|ck::|ck_tile::"
    r"|fbgemm|torch|vllm|split_embedding|_ZN(?:2at6native|2ck|7ck_tile|\d\dcutlass|7cutlass)|pytorch_flash|flash_"
    r"|fmha_|nccl|rccl|cunn_|sm\d+_|ampere_|volta_|turing_|hopper_|Cijk_|nvjet_|gemv|gemm|split[kK]|dot_kernel"
    r"|reduce_1|igemm_|implicit_convolve|explicit_convolve|softmax_warp|triton_|Mem(?:cpy|set)\b|__amd_rocclr|miopen"
    r"|rocblas|hipblas|batched_transpose|[wd]grad_|SubTensorOp|multi_tensor|elementwise_kernel|indexing_backward"
    r"|transpose_|_matmul_ogs|_combined_routing|_topk_forward|_sum_bitmatrix|_finalize_matmul|dma_request"
    r"|kernel_unified_attention|attn_fwd|cuda[A-Z]|cu[A-Z]|hip[A-Z]|runFunction|INVALID|Context |Event |Stream "
    r"|autograd::|\w+Backward\d|AOTDispatcher|Pregraph|TorchDynamo|record_param)"
)
_MODULES = ("nn", "nn.modules", "optim", "autograd", "distributed", "fx", "ao.nn.quantized")
_FOLDERS = (
    "_dynamo", "_inductor", "accelerator", "amp", "autograd", "cuda", "distributed", "fx", "jit", "nn", "optim",
    "profiler", "utils",
)  # fmt: skip
_STANDARD = (
    "asyncio", "collections", "concurrent", "ctypes", "email", "encodings", "html", "http", "importlib", "json",
    "logging", "multiprocessing", "re", "sqlite3", "unittest", "urllib", "xml", "zoneinfo",
)  # fmt: skip

_BY_HAND = """
    NVIDIA AMD Intel Instinct Tesla Quadro GeForce RTX GTX Radeon PRO Ada Generation Laptop GPU Graphics Max
    Super Ti TITAN Xp GH200 GB200 GB300 B100 B200 B300 H20 H100 H200 H800 A10 A10G A16 A2 A30 A40 A100 A800
    A4000 L4 L20 L40 L40S T4 P4 P40 P100 GP100 V100 V100S K80 MI50 MI60 MI100 MI210 MI250 MI250X MI300A MI300X
    MI308X MI325X MI350X MI355X VF HF SXM2 SXM3 SXM4 SXM5 PCIe PCI NVL 80GB HBM2 HBM2e HBM3 HBM3e MB GB DGXS DGX
    HGX MIG 1g 10gb OAM Orin Xavier Thor CPU events of phase are not read more phases values another type the
    beginning array is damaged after end their file cut off its does not gzip data stream zero bytes ends in an
    event that JSON text metadata truncated repaired control characters bare words quotes escapes invalid UTF
    trailing duplicate key keys numbers last longer than trace can impossible gpu with start clock times other
    incorrect check error while decompressing header distance too far back block lengths code set literal
    unknown compression method window size bit symbols distances over subscribed length missing stored memory
    allocated multiprocessors threads per identifier backslashes unquoted flash_fwd_kernel
    flash_fwd_splitkv_kernel flash_fwd_splitkv_combine_kernel Flash_fwd_kernel_traits Flash_fwd_params
    Flash_bwd_kernel_traits Flash_bwd_params flash_bwd_dot_do_o_kernel flash_bwd_convert_dq_kernel
    flash_bwd_convert_dkv flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel FlashAttnFwdSm90 FlashAttnBwdSm90
    FlashAttnFwdCombine Softmax Epilogue FlashAttnBwdPreprocess FlashAttnBwdPostprocessConvertdQ
    CollectiveMainloopFwdSm90 CollectiveEpilogueFwd enable sm90 VarlenDynamicPersistentTileScheduler
    StaticPersistentTileScheduler SingleTileScheduler DynamicPersistentTileScheduler
    fmha_cutlassF_f16_aligned_64x64_rf_sm80 fmha_cutlassB_bf16_aligned_128x64_k96_dropout_sm80 fmha_v2
    PyTorchMemEffAttention compute_attn_ws BatchPrefillWithPagedKVCacheKernel BatchDecodeWithPagedKVCacheKernel
    PersistentVariableLengthMergeStates
    cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1_kernel0_0 bprop engine
    knobs paged_attention_v1_kernel paged_attention_v2_reduce_kernel reshape_and_cache_flash_kernel
    rms_norm_kernel prefix prefill fused_add_rms_norm_kernel rotary_embedding_kernel act_and_mul_kernel
    silu_kernel topkGatingSoftmax moe_align_block_size moe_sum_kernel count_and_sort_expert_tokens_kernel
    fused_moe_kernel dynamic_scaled_fp8_quant static_scaled marlin awq gptq machete scaled_mm_kernel
    per_token_group_quant_8bit swigluoai concat_and_cache_mla copy_blocks merge_attn_states
    apply_repetition_penalties allspark bitsandbytes kgemm_4bit_inference_naive kDequantizeBlockwise
    kOptimizerStatic8bit nvjet_tst_128x64_64x11_2x1_v_bz_TNT nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT nvjet_tss
    splitK coopB sss qqtst NNT TNN ncclDevKernel_AllGather_RING_LL
    ncclDevKernel_ReduceScatter_Sum_bf16_TREE_LL128 ncclDevKernel_Broadcast_NVLS_SIMPLE
    ncclDevKernel_Reduce_Prod_f8e4m3_COLLNET_DIRECT_CHAIN ncclDevKernel_SendRecv PAT MinMax PreMulSum SumPostDiv
    u32 i64 ncclSymkDevKernel_AllReduce_AGxLL_R ncclSymDevKernel RSxLDMC ncclDevFunc ncclDevKernelArgsStorage
    Max Min Avg float64 deep_ep intranode internode_ll dispatch combine notify cached layout deep_gemm
    fp8_gemm_kernel sm100 sm90_fp8_gemm_1d2d multi_tensor_apply_kernel AdamFunctorMaster AdamCapturableFunctor
    L2NormFunctor ScaleFunctor apex transformer_engine cast_transpose_fused_kernel rmsnorm_fwd_general_kernel
    ln_fwd_tuned_kernel ln_bwd_finalize scaled_upper_triang_masked thd unfused mxfp8 nvfp4 rht hadamard swizzle
    block_scaled_1d_cast fp8_transpose te userbuffers delayed scaling gemv2T_kernel_val gemv2N_kernel
    gemvNSP_kernel gemmSN_TN_kernel gemmk1_kernel gemm_kernel2x1_val splitKreduce_kernel dot_kernel
    reduce_1Block_kernel cublasLt cublasGemvTensorStridedBatched cublasGemmSmallN cutlass_80_tensorop_bf16
    s16816gemm_relu_bf16_256x128_32x3_tn_align8 ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn
    h884gemm s1688gemm s884gemm i16832gemm h16816gemm d884gemm s1688tf32gemm cgemm zgemm dgemm sgemm hgemm
    igemm32x32 cf32 tf32f32
    cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1_0_tnn_align8_warpspecialized_cooperative
    epi_tma pingpong cpasync stream implicit_convolve_sgemm explicit_convolve conv2d_grouped_direct_kernel
    winograd nonfused fft2d_r2c_32x32 fft2d_c2r_16x16 flip_filter compute_gemm_pointers nchwToNhwcKernel
    nhwcToNchwKernel nhwcAddPadding bn_fw_tr_1C11_kernel_NCHW bn_bw_1C11_singleread_specialized dgrad_engine
    wgrad_alg0_engine wgrad2d_c1_k1_nhwc op_generic pooling_fw_4d_kernel RNN_blockPersist elemWiseRNNcell
    persistRNN LSTM_elementWise_fp GRU softmax_fw tensorTransformGeneric MIOpen MIOpenBatchNormFwdTrainSpatial
    miopenSp3AsmConv_v30_3_1_gfx94x Im2d2Col Col2Im2d Op2dTensorGeneric mloPooling gcnAsm
    __amd_rocclr_fillBufferAligned __amd_rocclr_copyBuffer __amd_rocclr_initHeap rcclGenericKernel gfx942 gfx90a
    gfx1100 Custom Cijk_Alik_Bljk_HHS_BH_SB_Bias_AS_SAV_UserArgs_MT64x64x64 SHB HHB HSS DB SB ISA942 K1 WG32
    WS64 WGM8 PGR2 PLR1 aiter MoRI EpDispatchInterNode EpCombineIntraNode nvshmemi_proxy rocshmem
    quick_all_reduce two_shot one_shot multimem barrier kernel func custom reset spin sleep sleeping
    vectorized_gather_kernel radixSortKVInPlace bitonicSortKVInPlace gatherTopK DeviceRadixSortOnesweepKernel
    DeviceRadixSortHistogramKernel DeviceRadixSortExclusiveSumKernel DeviceScanInitKernel DeviceScanKernel
    DeviceReduceSingleTileKernel DeviceReduceKernel DeviceSegmentedReduceKernel DeviceSelectSweepKernel
    DeviceRunLengthEncode DeviceSegmentedRadixSortKernel DeviceCompactInitKernel DeviceUniqueByKey Policy800
    Agent tag computeBlockwiseWithinKthCounts radixFindKthValues sbtopk mbtopk tensor_kernel_scan_innermost_dim
    krn_partials compute_grad_weight embedding_bag sum_and_scatter indexSelectLargeIndex cunn_SoftMaxForwardSmem
    vectorized_layer_norm GammaBetaBackwardCUDAKernelTemplate fused_dropout_kernel RowwiseMomentsCUDAKernel
    upsample_nearest2d_out_frame grid_sampler bilinear bicubic triu_tril_kernel distribution_nullary philox
    avg_pool2d_out_cuda_frame ctc_loss_log_alpha roi_align nms HtoD DtoH DtoD PtoP HtoH HtoA AtoH AtoD DtoA AtoA
    Pageable Pinned Managed Unified Device Array Unknown CopyHostToDevice CopyDeviceToHost CopyDeviceToDevice
    all_reduce reduce_scatter all_gather into_tensor base coalesced all_to_all send recv gather scatter
    broadcast barrier isend irecv nccl gloo mpi ucc xccl hccl complex32 complex64 complex128 e4m3 e5m2 fnuz
    __call__ __enter__ __exit__ __iter__ __next__ __init__ __new__ __getattr__ __setattr__ __getitem__ __len__
    __repr__ __del__ listcomp genexpr dictcomp setcomp lambda locals PyCapsule mappingproxy builtin built
    pybind11_object _TensorBase layer block model encoder decoder head attention attn mlp ffn proj query value
    output input hidden states embed pos DRAM HBM MHz GHz RX PCIe
"""  # kernels of libraries that the traces lack, GPUs, counters, and what readers say of a damaged file


def vocabulary(folder: Path) -> list[str]:
    """Return the words, sorted."""
    sources = (_operators(), _classes(), _calls(), _of_packages(), _standard(), _of_tests(), _traced(folder))
    found = {pattern_of(word) for source in sources for name in source for word in _words(name)}
    found |= {pattern_of(word) for word in _words(_BY_HAND)}
    return sorted(word for word in found if word.isascii() and len(word) <= _MOST and not _CODE.fullmatch(word))


def _words(name: str) -> Iterator[str]:
    for piece in re.findall(r"[^\W_]+", name):
        yield from words_of(piece)


def _operators() -> Iterator[str]:
    for schema in torch._C._jit_get_all_schemas():
        yield f"{schema.name} {schema.overload_name}"


def _classes() -> Iterator[str]:
    yield from dir(torch)
    yield from dir(torch._C._functions)
    for module in _MODULES:
        yield from dir(__import__(f"torch.{module}", fromlist=["_"]))


def _calls() -> Iterator[str]:
    """Yield the calls of CUDA's and HIP's runtime and driver."""
    for mapping in hipify.CUDA_TO_HIP_MAPPINGS:
        for name, other in mapping.items():
            names = (name, other[0] if isinstance(other, tuple) else other)
            yield from (each for each in names if re.fullmatch(r"(?:cuda|cu|hip)[A-Z](?![A-Z]+_)\w*", str(each)))


def _of_packages() -> Iterator[str]:
    """Yield the paths of the files of torch, its functions and classes, and the names of known packages."""
    yield from PACKAGES
    home = Path(torch.__file__).parent
    for folder in (home, *(home / name for name in _FOLDERS)):
        for path in folder.glob("*.py") if folder == home else folder.rglob("*.py"):
            yield str(path.relative_to(home))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not path.match("*/_inductor/*"):
                    yield node.name


def _standard() -> Iterator[str]:
    """Yield the paths of the standard library."""
    yield from sys.stdlib_module_names
    home = Path(sysconfig.get_path("stdlib"))
    for package in _STANDARD:
        yield from (str(path.relative_to(home)) for path in (home / package).rglob("*.py"))


def _of_tests() -> Iterator[str]:
    for name in (*NAMES, *kinds.COMMUNICATE, *kinds.COMPUTE, *kinds.MATRIX_UNITS, *kinds.ORDINARY_UNITS):
        yield from _of_library(name)


def _traced(folder: Path) -> Iterator[str]:
    """Yield the names in real traces that are of torch, of libraries or of known packages."""
    for path in samples(folder):
        try:
            trace = read_trace(path)
        except TraceError:
            continue
        for table in (trace.operators, trace.runtime, trace.gpu, trace.syncs, trace.frames):
            for name in set(table.text("name")):
                if name.startswith(MODULE_PREFIX) or name.startswith("<built-in"):
                    yield name.partition(" at 0x")[0]
                elif frame := FRAME.match(name):
                    if re.split(r"[/\\]", frame["file"])[0] in PACKAGES:
                        yield f"{frame['file']} {frame['function']}"
                else:
                    yield from _of_library(name)


def _of_library(name: str) -> Iterator[str]:
    if _LIBRARY.match(name) and "dpsk" not in name:  # a company's own kernels as arguments of a library's
        yield from parse(name).details if name.startswith("_Z") else [name]


if __name__ == "__main__":
    VOCABULARY.write_text("\n".join(vocabulary(Path(sys.argv[1]))) + "\n", encoding="ascii")
