// cuBLAS and cuBLASLt: handles, and one kernel for each computation.
#include <algorithm>
#include <cstdio>

// The headers of the narrow floats need libcu++; their names are enough here.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half {
  unsigned short bits;
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat16 {
  unsigned short bits;
};
#include <cublasLt.h>
#include <cublas_v2.h>

#include "sim.h"

using namespace sim;
#define BLAS EXPORT cublasStatus_t

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
  int multiprocessors = 0;
};
Handle* of(cublasHandle_t handle) { return reinterpret_cast<Handle*>(handle); }

struct Layout {
  cudaDataType type;
  uint64_t rows, columns;
  int32_t batch = 1;
};
Layout* of(cublasLtMatrixLayout_t layout) { return reinterpret_cast<Layout*>(layout); }

struct Description {
  bool transposes_first = false;
};
Description* of(cublasLtMatmulDesc_t description) { return reinterpret_cast<Description*>(description); }

struct Product {
  int64_t m, n, k, batch;
  cudaDataType type;
};

const char* name_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_32F:
      return "f32";
    case CUDA_R_64F:
      return "f64";
    case CUDA_R_16F:
      return "f16";
    case CUDA_R_16BF:
      return "bf16";
    case CUDA_R_8F_E4M3:
      return "e4m3";
    case CUDA_R_8F_E5M2:
      return "e5m2";
    case CUDA_R_8I:
      return "i8";
    case CUDA_C_32F:
      return "c64";
    default:
      return "other";
  }
}

bool is_narrow(cudaDataType type) {
  return type != CUDA_R_32F && type != CUDA_R_64F && type != CUDA_C_32F && type != CUDA_C_64F;
}

// As cuBLAS names them on an H100, or with GEMM_SHAPES=1 by their shape.
std::string kernel_name(const Product& product) {
  static Setting shapes("GEMM_SHAPES");
  if (shapes) {
    char name[160];
    snprintf(name, sizeof name, "sim_gemm%s_%ldx%ldx%ld_%s", product.batch > 1 ? "_batched" : "", long(product.m),
             long(product.n), long(product.k), name_of(product.type));
    return name;
  }
  if (is_narrow(product.type)) return "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT";
  if (product.type == CUDA_R_64F) return "cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1";
  return "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_"
         "kernel__5x_cublas";
}

// An operation in 1 ns is 1 GFLOP/s.
int64_t length_of(const Product& product) {
  static Setting base("KERNEL_NS"), wide("GFLOPS"), narrow("HALF_GFLOPS");
  int64_t rate = is_narrow(product.type) ? narrow : wide;
  double operations = 2.0 * double(product.m) * double(product.n) * double(product.k) * double(product.batch);
  return base + int64_t(operations / double(std::max<int64_t>(rate, 1)));
}

// On an H100, cuBLAS launches the kernels of narrow types by the driver.
cublasStatus_t launch_named(cudaStream_t stream, const std::string& name, dim3 grid, int64_t duration,
                            bool by_driver = false) {
  cupti::Call call(by_driver ? CUPTI_CB_DOMAIN_DRIVER_API : CUPTI_CB_DOMAIN_RUNTIME_API,
                   by_driver ? uint32_t(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx)
                             : uint32_t(CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000));
  Kernel* kernel;
  {
    LOCKED;
    kernel = named_kernel(name);
  }
  call.say(launch(stream, kernel, grid, dim3(128), 0, call.correlation, nullptr, duration));
  return call.result == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t multiply(cudaStream_t stream, const Product& product) {
  auto tiles = [](int64_t length) { return unsigned(std::max<int64_t>((length + 127) / 128, 1)); };
  return launch_named(stream, kernel_name(product), dim3(tiles(product.m), tiles(product.n)), length_of(product),
                      is_narrow(product.type));
}

}  // namespace

// From the functions that build.py generates: those that compute, with the handle and the arguments 4 to 6.
extern "C" int simgpu_blas(const char* name, void* handle, long m, long n, long k) {
  missing(name, 0);
  std::string text = name;
  cudaStream_t stream = static_cast<Handle*>(handle)->stream;
  if (text.find("emm") == std::string::npos) return launch_named(stream, "sim_" + text, dim3(1), -1);
  char letter = text[strlen("cublas")];
  cudaDataType type = letter == 'D'   ? CUDA_R_64F
                      : letter == 'H' ? CUDA_R_16F
                      : letter == 'C' ? CUDA_C_32F
                                      : CUDA_R_32F;
  return multiply(stream, {int(m), int(n), int(k), 1, type});
}

BLAS cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasDestroy_v2(cublasHandle_t handle) {
  delete of(handle);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasGetVersion_v2(cublasHandle_t, int* version) {
  *version = 130101;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasGetProperty(libraryPropertyType type, int* value) {
  *value = type == MAJOR_VERSION ? 13 : 1;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  of(handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
  *stream = of(handle)->stream;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
BLAS cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  of(handle)->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = of(handle)->math;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  of(handle)->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = of(handle)->pointers;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasSetSmCountTarget(cublasHandle_t handle, int count) {
  of(handle)->multiprocessors = count;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasGetSmCountTarget(cublasHandle_t handle, int* count) {
  *count = of(handle)->multiprocessors;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasSetAtomicsMode(cublasHandle_t, cublasAtomicsMode_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT const char* cublasGetStatusString(cublasStatus_t) { return "a status of the simulated cuBLAS"; }
EXPORT const char* cublasGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS"; }

BLAS cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*,
                  const void*, cudaDataType type, int, const void*, cudaDataType, int, const void*, void*,
                  cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) {
  return multiply(of(handle)->stream, {m, n, k, 1, type});
}
BLAS cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                const void*, const void*, cudaDataType type, int, long long, const void*,
                                cudaDataType, int, long long, const void*, void*, cudaDataType, int, long long,
                                int batch, cublasComputeType_t, cublasGemmAlgo_t) {
  return multiply(of(handle)->stream, {m, n, k, batch, type});
}
BLAS cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                               const float*, const float*, int, long long, const float*, int, long long, const float*,
                               float*, int, long long, int batch) {
  return multiply(of(handle)->stream, {m, n, k, batch, CUDA_R_32F});
}
BLAS cublasDgemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                               const double*, const double*, int, long long, const double*, int, long long,
                               const double*, double*, int, long long, int batch) {
  return multiply(of(handle)->stream, {m, n, k, batch, CUDA_R_64F});
}

// ---- cuBLASLt

BLAS cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<Handle*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT size_t cublasLtGetVersion() { return 130101; }
EXPORT size_t cublasLtGetCudartVersion() { return 13000; }
BLAS cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows, uint64_t columns,
                                int64_t) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns});
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  delete of(layout);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                      const void* value, size_t) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) of(layout)->batch = *static_cast<const int32_t*>(value);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t, cudaDataType) {
  *description = reinterpret_cast<cublasLtMatmulDesc_t>(new Description);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t description) {
  delete of(description);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute,
                                    const void* value, size_t) {
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA)
    of(description)->transposes_first = *static_cast<const int32_t*>(value) != CUBLAS_OP_N;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<int*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                          const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, const cublasLtMatmulDesc_t, const cublasLtMatrixLayout_t,
                                    const cublasLtMatrixLayout_t, const cublasLtMatrixLayout_t,
                                    const cublasLtMatrixLayout_t, const cublasLtMatmulPreference_t, int wanted,
                                    cublasLtMatmulHeuristicResult_t* results, int* count) {
  *count = wanted > 0;
  if (wanted <= 0) return CUBLAS_STATUS_SUCCESS;
  *results = {};
  results->state = CUBLAS_STATUS_SUCCESS;
  results->wavesCount = 1;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulAlgoInit(cublasLtHandle_t, cublasComputeType_t, cudaDataType, cudaDataType, cudaDataType,
                            cudaDataType, cudaDataType, int, cublasLtMatmulAlgo_t* algorithm) {
  *algorithm = {};
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulAlgoCheck(cublasLtHandle_t, const cublasLtMatmulDesc_t, const cublasLtMatrixLayout_t,
                             const cublasLtMatrixLayout_t, const cublasLtMatrixLayout_t, const cublasLtMatrixLayout_t,
                             const cublasLtMatmulAlgo_t*, cublasLtMatmulHeuristicResult_t* result) {
  *result = {};
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t, const void*,
                                          size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t,
                                          void* value, size_t bytes, size_t* written) {
  if (value) memset(value, 0, bytes);
  if (written) *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
BLAS cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void*, const void*,
                    const cublasLtMatrixLayout_t first, const void*, const cublasLtMatrixLayout_t, const void*,
                    const void*, const cublasLtMatrixLayout_t, void*, const cublasLtMatrixLayout_t result,
                    const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  auto *in = of(first), *out = of(result);
  uint64_t inner = of(description)->transposes_first ? in->rows : in->columns;
  return multiply(stream, {int64_t(out->rows), int64_t(out->columns), int64_t(inner), out->batch, in->type});
}
