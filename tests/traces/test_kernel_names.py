"""Short names and families of kernels: what they say, and that they tell kernels apart."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.read import read_trace
from instrument.read.tables.kernel_names import FAMILIES, family, parse, short_names
from tests.diagnosis.small_traces import kernel, memcpy, trace_of
from tests.support.shared_traces import shared

AT = "at::native::"
ARRAY = "std::array<char*, 3ul>"
COPY = f"{AT}direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#3}}::operator()() const::{{lambda()#12}}"
LAMBDA = f"{COPY}::operator()() const::{{lambda(c10::BFloat16)#1}}"
CK = "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28Gridwise"

NAMES = {
    # torch
    "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false, false>"
    "(c10::BFloat16*, c10::BFloat16 const*, int)": ("softmax_warp_forward<bf16>", "softmax"),
    "void <unnamed>::softmax_warp_forward<float, float, float, (int)7, (bool)0>(T2 *, const T1 *)": (
        "softmax_warp_forward<f32>", "softmax",
    ),
    f"void {AT}(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>(int)": (
        "cunn_SoftMaxForward<bf16>", "softmax",
    ),
    f"void {AT}elementwise_kernel<128, 4, {AT}gpu_kernel_impl_nocast<{LAMBDA}>(at::TensorIteratorBase&)::"
    "{lambda(int)#1}>(int)": ("elementwise: direct_copy<bf16>", "copy"),
    f"void {AT}unrolled_elementwise_kernel<{LAMBDA}, {ARRAY}, 4>(int)": ("elementwise: direct_copy<bf16>", "copy"),
    f"void {AT}vectorized_elementwise_kernel<4, {AT}CUDAFunctor_add<c10::BFloat16>, {ARRAY}>(int)": (
        "elementwise: add<bf16>", "elementwise",
    ),
    f"void {AT}vectorized_elementwise_kernel<(int)4, {AT}CUDAFunctor_add<float>, "
    "std::array<char *, (unsigned long)3>>(int, T2, T3)": ("elementwise: add<f32>", "elementwise"),
    f"void {AT}vectorized_elementwise_kernel<4, {AT}BinaryFunctor<float, float, float, "
    f"{AT}binary_internal::MulFunctor<float> >, {ARRAY} >(int)": ("elementwise: mul<f32>", "elementwise"),
    f"void {AT}index_elementwise_kernel<128, 4, {AT}gpu_index_kernel<{AT}index_kernel_impl<{AT}OpaqueType<2> >"
    "(at::TensorIteratorBase&)::{lambda(char*, char const*, long)#1}>()>(long)": (
        "elementwise: index<2 B>", "embedding",
    ),
    f"void {AT}reduce_kernel<512, 1, {AT}ReduceOp<float, {AT}MeanOps<float, float, float, float>, "
    "unsigned int> >()": (
        "reduce: mean<f32>", "reduction",
    ),
    f"void {AT}reduce_kernel<128, 4, {AT}ReduceOp<float, {AT}func_wrapper_t<float, "
    f"{AT}sum_functor<float, float, float>::operator()(at::TensorIterator&)::{{lambda(float, float)#1}}>, "
    "unsigned int> >()": ("reduce: sum<f32>", "reduction"),
    f"void {AT}(anonymous namespace)::multi_tensor_apply_kernel<{AT}(anonymous namespace)::TensorListMetadata<2>, "
    f"{AT}(anonymous namespace)::BinaryOpListAlphaFunctor<float, 2, 2, 0>, std::plus<float>, float>()": (
        "foreach: BinaryOpListAlpha plus<f32>", "optimizer",
    ),
    f"void {AT}(anonymous namespace)::CatArrayBatchedCopy<{AT}(anonymous namespace)::OpaqueType<2u>, "
    "unsigned int, 4>()": ("CatArrayBatchedCopy<2 B>", "copy"),
    f"void {AT}(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int)": (
        "vectorized_layer_norm_kernel<bf16>", "normalization",
    ),
    f"void {AT}(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2>(long)": (
        "indexSelectLargeIndex<bf16>", "embedding",
    ),
    f"void {AT}<unnamed>::max_pool_forward_nchw<float>(int)": ("max_pool_forward_nchw<f32>", "reduction"),
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t> , false>(pytorch_flash::Flash_fwd_params)": ("flash_fwd_kernel<bf16>", "attention"),
    "triton_poi_fused_add_gelu_3": ("triton_poi_fused_add_gelu_3", "elementwise"),
    "triton_poi_fused_convolution_relu_1": ("triton_poi_fused_convolution_relu_1", "elementwise"),
    "triton_poi_fused__to_copy_1": ("triton_poi_fused__to_copy_1", "copy"),
    "triton_red_fused__softmax_2": ("triton_red_fused__softmax_2", "softmax"),
    "triton_per_fused_add_native_layer_norm_0": ("triton_per_fused_add_native_layer_norm_0", "normalization"),
    "triton_tem_fused_mm_7": ("triton_tem_fused_mm_7", "gemm"),
    # matrix libraries
    "volta_sgemm_128x64_nt": ("volta_sgemm_128x64_nt", "gemm"),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off": (
        "gemm sm90 bf16 128x256x64 tn", "gemm",
    ),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute": (
        "gemm sm80 f32 64x256x8 tn", "gemm",
    ),
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1>(Params)": (
        "gemm sm75 bf16 256x128 tn align1", "gemm",
    ),
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_16x6_nt_align1>(Params)": (
        "gemm sm80 tf32 128x64x16 nt align1", "gemm",
    ),
    "nvjet_tst_192x208_64x4_1x1_h_bz_coopB_bias_TNT": ("gemm nvjet bf16 192x208x64 TNT", "gemm"),
    "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>(Params)": (
        "fp8_ptp128c::GemmKernel", "gemm",
    ),
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, false>(P)": (
        "gemvx::kernel<bf16>", "gemm",
    ),
    "void splitKreduce_kernel<32, 16, int, float, float, true>(cublasSplitKParams<float>)": (
        "splitKreduce_kernel<f32>", "gemm",
    ),
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x128x32_MI16x16x1_SN_LDSB1": (
        "Cijk Alik_Bljk MT64x128x32 bf16", "gemm",
    ),
    "cudnn_infer_volta_scudnn_128x64_relu_xregs_large_nn_v1": ("conv sm70 f32 128x64 nn", "convolution"),
    "void cutlass_cudnn_train::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_256x128_16x3_nhwc_align4>(P)": (
        "conv wgrad tf32 256x128x16 nhwc align4", "convolution",
    ),
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x64x8_wt64x16x4_ws1x1": ("conv fwd bf16 256x64x8 nhwc", "convolution"),
    CK: ("kernel_grouped_conv_fwd_xdl_cshuffle_v3", "convolution"),
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOne": ("Rmsnorm2dFwd", "normalization"),
    # collectives, whose family the table of GPU work knows
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
        "ncclDevKernel_AllReduce_Sum_bf16", None,
    ),
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)": ("ncclKernel_AllReduce_Sum_float", None),
    # others
    "__amd_rocclr_copyBuffer": ("__amd_rocclr_copyBuffer", "copy"),
    "attn_fwd.kd": ("attn_fwd.kd", "attention"),
    "aten::cat.out-dtype_Float-extraKey_1": ("aten::cat.out-dtype_Float-extraKey_1", "copy"),
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int>::Policy800, false, long>()": (
        "DeviceRadixSortOnesweepKernel<i64>", "sort",
    ),
    "_combined_routing_compute": ("_combined_routing_compute", "routing"),
    "my_kernel": ("my_kernel", "other"),
    "": ("", "other"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    """The short name says the operation and its type, the family what kind of work it is."""
    short, kind = NAMES[name]
    assert parse(name).short == short
    assert kind is None or family(parse(name)) == kind
    assert kind is None or kind in FAMILIES


def test_different_kernels_have_different_names() -> None:
    """The words in which names differ follow the short name; if no word differs, a hash."""
    add = f"void {AT}%s<%s, {AT}%s<float>, {ARRAY}>(int)"
    names = [
        add % ("vectorized_elementwise_kernel", 4, "CUDAFunctor_add"),
        add % ("vectorized_elementwise_kernel", 2, "CUDAFunctor_add"),
        add % ("unrolled_elementwise_kernel", 4, "CUDAFunctor_add"),
        "void softmax_warp_forward<float, 9>(float*)",
        "void softmax_warp_forward<float, 10>(float*)",
        "void other<float>(float*)",
        "void other<float>(int*)",
        "alone",
    ]
    first, second, *rest = short_names(names).values()
    assert (first, second) == ("elementwise: add<f32> (vectorized, 4)", "elementwise: add<f32> (vectorized, 2)")
    assert rest[0] == "elementwise: add<f32> (unrolled, 4)"
    assert rest[1:3] == ["softmax_warp_forward<f32> (9)", "softmax_warp_forward<f32> (10)"]
    assert [name.partition(" #")[0] for name in rest[3:5]] == ["other<f32>", "other<f32>"]
    assert rest[5] == "alone"
    assert len({*short_names(names).values()}) == len(names)


@given(st.lists(st.text(st.sampled_from("ab<>(),:_ 19{}[]*&#") | st.characters(), max_size=40), max_size=12))
def test_any_text(texts: list[str]) -> None:
    """Any text is a name; different names have different short names, and what was short stays as it is."""
    names = [*NAMES, *texts, "x (1)", "x"]
    shorts = short_names(names)
    assert len({*shorts.values()}) == len({*names})
    assert shorts["my_kernel"] == "my_kernel"


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_cut_off(name: str) -> None:
    """A name may end anywhere."""
    pieces = [name[:end] for end in range(len(name))]
    assert len({*short_names(pieces).values()}) == len({*pieces})
    assert all(family(parse(piece)) in FAMILIES for piece in pieces)


@pytest.mark.parametrize(
    "part", ["<", "a<", "(", "Cijk_", "_S_", "kernel_impl_", "compute", "_ZN1", "9", "{lambda(", "::", "conv_"]
)
def test_long_names_take_no_longer(part: str) -> None:
    """A name of 200,000 characters is read in well under a second."""
    begin = time.process_time()
    for start in ("", "void ", "_ZN", "Cijk_A", f"{AT}elementwise_kernel<", "nccl", "triton_poi_fused_"):
        family(parse(start + part * 200_000))
    assert time.process_time() - begin < 5
    assert all(len(short) < 250 for short in short_names([part * 200_000, part * 200_001]).values())


def test_columns_of_the_table() -> None:
    """GPU work has both columns; the table of kernels and its report name kernels by them."""
    kernels = ("void k<float>(int)", "void k<float>(long)", "ncclDevKernel_AllGather_RING_LL()")
    work = [kernel(name, at, at + 10) for at, name in enumerate(kernels)]
    trace = trace_of(gpu=[*work, memcpy("Memcpy DtoD", 30, 40)])
    shorts = trace.gpu.text("short_name")
    assert [short.partition(" #")[0] for short in shorts] == [
        "k<f32>",
        "k<f32>",
        "ncclDevKernel_AllGather",
        "Memcpy DtoD",
    ]
    assert trace.gpu.text("family") == ["other", "other", "collective", "memory"]
    assert trace.gpu.where(slice(1, 3)).text("short_name") == shorts[1:3]
    rows = {row["name"]: row for row in metrics(trace)["kernel_table"]}
    assert rows["void k<float>(long)"]["short_name"] == shorts[1]
    assert rows["ncclDevKernel_AllGather_RING_LL()"]["family"] == "collective"


def test_trace_without_gpu_work() -> None:
    """An empty table has empty columns."""
    assert trace_of().gpu.text("short_name") == trace_of().gpu.text("family") == []


def test_absurdly_many_names() -> None:
    """Beyond 10,000 names, kernels keep their full names, which bounds the time."""
    trace = trace_of(gpu=[kernel(f"void k{number}<float>(int)", number, number + 1) for number in range(10_003)])
    shorts = trace.gpu.text("short_name")
    assert len({*shorts}) == 10_003
    assert sum(short.startswith("void ") for short in shorts) == 3


def test_names_that_nearly_agree() -> None:
    """Thousands of names with the same short name, or in groups of them, are told apart in bounded time."""
    dice = random.Random(0)
    begin = time.process_time()
    for size in (32, 3000):
        texts = [
            ", ".join(f"w{dice.randrange(10**6)}" for _ in range(dice.randrange(30, 60))) for _ in range(3000)
        ]
        names = [f"void k{number // size}<{text}>(int)" for number, text in enumerate(texts)]
        assert len({*short_names(names).values()}) == len(names)
    assert time.process_time() - begin < 30


# The operators that launch them say what kernels do; kernels beside them, such as fills, differ.
OPERATORS = {
    "gemm": {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"},
    "convolution": {"aten::cudnn_convolution", "aten::miopen_convolution"},
    "softmax": {"aten::_softmax", "aten::_softmax_backward_data", "aten::_log_softmax"},
    "normalization": {"aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::cudnn_batch_norm"},
    "attention": {"aten::_flash_attention_forward", "aten::_efficient_attention_forward"},
    "embedding": {"aten::index_select", "aten::embedding_dense_backward", "aten::gather"},
    "copy": {"aten::cat", "aten::copy_"},
    "elementwise": {"aten::mul", "aten::add", "aten::add_", "aten::mul_", "aten::gelu", "aten::sigmoid"},
    "reduction": {"aten::sum", "aten::mean", "aten::max_pool2d_with_indices", "aten::nll_loss_forward"},
}  # fmt: skip
# Convolutions of 1x1 are matmuls, and change the layout around them; addmm copies its bias.
ALSO = {"convolution": {"gemm", "copy", "elementwise"}, "gemm": {"copy"}}
REAL = [
    "hta_nccl_data", "hta_ns_resolution", "hta_tracediff_control", "kineto_tb_resnet50_nw0_v100",
    "param_resnet_kineto", "param_dlrm_8rank_r0", "tl_h100_bert_small", "tl_h100_owlv2", "tl_h100_qwen05b",
    "tl_mi300_bert_small",
    "tl_mi300_resnet_actckpt", "tl_vllm_decode_full_cudagraph", "deepseek_train_h800",
]  # fmt: skip


NAMELESS = {"Kernel", "aux_fi_impl", "fill_tensormaps_kernel"}
"""Kernels of real traces whose names do not say what they do."""


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest) -> Path:
    return shared(f"{request.param}.json.gz")


def test_real_traces(real: Path) -> None:
    """Kernels of real traces have distinct short names and a family."""
    gpu = read_trace(real).kernels
    names = dict(zip(gpu.text("name"), gpu.text("short_name"), strict=True))
    assert len({*names.values()}) == len(names)
    other = {
        short for short, kind in zip(gpu.text("short_name"), gpu.text("family"), strict=True) if kind == "other"
    }
    assert other <= NAMELESS


def test_families_of_operators(real: Path) -> None:
    """The kernels of an operator are of its family, by their time."""
    trace = read_trace(real)
    linked = trace.kernels.where(trace.kernels.operator >= 0)
    operators = trace.operators.where(linked.operator).text("name")
    for kind, names in OPERATORS.items():
        rows = [row for row, name in enumerate(operators) if name in names]
        times = list(zip(linked.where(rows).text("family"), linked.duration_ns[rows].tolist(), strict=True))
        right = sum(ns for found, ns in times if found == kind or found in ALSO.get(kind, ()))
        assert right >= 0.95 * sum(ns for _, ns in times), (kind, {found for found, _ in times})
