"""Kernels of communication and on matrix units are recognized by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instrument.explain.metrics.metrics import metrics

from .small_traces import Row, kernel, trace_of

COMMUNICATE = [
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
    "rcclGenericKernel",
    "mscclKernel_Sum_half_Simple_false(ncclDevComm*)",
    "void mscclpp::allreduceAllPairs<float>(float*)",
    "void nvshmemi_proxy_barrier()",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
    "void deep_ep::internode_ll::combine<true, 7168, 9>(void*)",
    "_ZN7deep_ep9internode8dispatchILb0ELi8EEEvP4int4",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__nv_bfloat16, 8, true>()",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>()",
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int)",
    "void two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>()",
    "multimem_all_gather_kernel",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>()",
]
COMPUTE = [
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)",
    "void deep_ep::internode::get_dispatch_layout<256, 32, 8>(long const*)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 4>()",
    "void at::native::vectorized_gather_kernel<16, long>(char*)",
    "void softmaxWarpAllReduce<float>(float*)",
    "void blockAllReduceSum<float>(float*)",
    "_combined_routing_compute",
    "splitKreduce_kernel",
    "flash_fwd_splitkv_combine_kernel",
    "moe_align_block_size_kernel",
    "triton_red_fused_add_all_any_0",
]
MATRIX_UNITS = [
    "volta_h884gemm_128x64_ldg8_tn",
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>",
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64>>",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1",
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32",
    "void ck_tile::kentry<1, ck_tile::BatchedGemmKernel<ck_tile::TileGemmShape<ck_tile::sequence<256>>, half>>",
    "void ck_tile::kentry<256, 1, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVS<bf16>>>",
    "_ZN7ck_tile6kentryILi1ENS_17GroupedGemmKernelINS_13TileGemmShape",
    "void ck::kernel_gemm_multiple_d_wmma_or_mfma<ck::GridwiseGemm<float>, _Float16>",
    "_ZN2ck16tensor_operation6device12_GLOBAL__N_16kernel_grouped_conv_fwd_multiple_abd",
    "_ZN5aiter37bf16gemm_fp32bf16_tn_96x64_splitkE",
]
ORDINARY_UNITS = [
    "ampere_sgemm_128x64_nn",
    "volta_scudnn_128x64_relu_small_nn_v1",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false>",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64>>",
    "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<cute::C<64>>>>",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>>",
    "Cijk_Ailk_Bljk_SB_MT64x64x8_SN_K1",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    "void ck::kernel_gemm_dl_v1r3<ck::GridwiseGemmDl_km_kn_mn_v1r3<256, _Float16>>",
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOne",
    "void ck_tile::kentry<1, ck_tile::MoeSortingKernel<ck_tile::MoeSortingProblem<int>>>",
]


@pytest.mark.parametrize(("names", "expected"), [(COMMUNICATE, 10), (COMPUTE, 0)], ids=["yes", "no"])
def test_communication(names: list[str], expected: int) -> None:
    """Communication kernels of each library are recognized; kernels with similar names are not."""
    found = {name: metrics(trace_of(gpu=[kernel(name, 0, 10)]))["comm_ns"] for name in names}
    assert found == dict.fromkeys(names, expected)


@pytest.mark.parametrize(("names", "expected"), [(MATRIX_UNITS, 10), (ORDINARY_UNITS, 0)], ids=["yes", "no"])
def test_matrix_units(names: list[str], expected: int) -> None:
    """Kernels on Tensor Cores and matrix cores are recognized by name."""
    found = {name: metrics(trace_of(gpu=[kernel(name, 0, 10)]))["tensor_core_ns"] for name in names}
    assert found == dict.fromkeys(names, expected)


def test_tensor_core_share() -> None:
    """The share is relative to the time of all kernels."""
    numbers = metrics(trace_of(gpu=[kernel("ampere_sgemm", 0, 30), kernel("nvjet_tst", 30, 40)]))
    assert numbers["tensor_core_share"] == 0.25


def test_collective_column() -> None:
    """A kernel that the trace marks as a collective is communication, whatever its name."""
    named = kernel("strange", 0, 10, collective="allreduce", group="tp")
    assert metrics(trace_of(gpu=[named]))["comm_ns"] == 10
    assert metrics(trace_of(gpu=[named]), "nccl")["comm_ns"] == 0


def reduce(start: int, end: int, **columns: object) -> Row:
    return kernel("nccl", start, end, stream=9, collective="allreduce", group="dp", dtype="BFloat16", **columns)


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("allreduce", 4, 1.5),
        ("all_gather_into_tensor", 4, 0.75),
        ("_reduce_scatter_base", 4, 0.75),
        ("all_to_allv", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("allreduce", 1, 0.0),
        ("barrier", 4, None),
    ],
)
def test_bus_bandwidth(name: str, ranks: int, factor: float | None) -> None:
    """The factors are those of nccl-tests, if the size of the group is known."""
    trace = trace_of(gpu=[reduce(0, 100, elements_out=50) | {"collective": name}])
    known = {"distributedInfo": {"pg_config": [{"pg_name": "dp", "pg_size": ranks}]}}
    (row,) = metrics(replace(trace, metadata=known))["collective_table"]
    assert row["bus_bytes_per_s"] == (None if factor is None else 1e9 * factor)
    for hostile in ([3], [{"pg_name": "dp", "pg_size": "4"}], 3):
        (row,) = metrics(replace(trace, metadata={"distributedInfo": {"pg_config": hostile}}))["collective_table"]
        assert row["bus_bytes_per_s"] is None


def test_collective_table() -> None:
    """Collectives have the bytes of the larger side, time and exposed time, by name, group and type."""
    numbers = metrics(
        trace_of(
            gpu=[
                kernel("gemm", 0, 60),
                reduce(50, 100, elements_in=10, elements_out=20),
                reduce(200, 250, elements_in=30, elements_out=30),
                kernel("ncclKernel_Broadcast", 300, 310),
            ]
        )
    )
    first, second = numbers["collective_table"]
    assert first == {
        "name": "allreduce",
        "group": "dp",
        "dtype": "BFloat16",
        "count": 2,
        "bytes": 100,
        "sum_ns": 100,
        "exposed_ns": 90,
        "bytes_per_s": 1e9,
        "bus_bytes_per_s": None,
    }
    assert (second["name"], second["bytes"], second["bytes_per_s"]) == ("ncclKernel_Broadcast", None, None)
