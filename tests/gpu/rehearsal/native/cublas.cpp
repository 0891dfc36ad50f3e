// libcublas.so.13: the documented calls of torch; each product is one launch.
// Its prototypes name these types, whose own header asks for more than pip's packages bring.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
struct __half;
struct __nv_bfloat16;
#include <cublas_v2.h>

#include <algorithm>

#include "fake.h"
using namespace fk;
FK void fakegpu_make_current();

struct Handle {
    cudaStream_t stream;
    cublasPointerMode_t pointers;
    cublasMath_t math;
    void* workspace;
    size_t bytes;
};

static cublasStatus_t product(cublasHandle_t h, const char* name, long m, long n, long k, long batch) {
    auto* x = (Handle*)h;
    if (m < 0 || n < 0 || k < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (!m || !n || !batch) return CUBLAS_STATUS_SUCCESS;
    int e = launch(x->stream, name, 1, 1, 1, 128, 1, 1, 0, 1);
    return e ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasCreate_v2(cublasHandle_t* h) {
    if (unsafe_call("cublasCreate")) return CUBLAS_STATUS_NOT_INITIALIZED;
    fakegpu_make_current();
    *h = (cublasHandle_t) new Handle{};
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasDestroy_v2(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }

FK cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
    ((Handle*)h)->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void* p, size_t n) {
    if ((uintptr_t)p % 256) return CUBLAS_STATUS_INVALID_VALUE;
    ((Handle*)h)->workspace = p;
    ((Handle*)h)->bytes = n;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t* m) {
    *m = ((Handle*)h)->math;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) {
    ((Handle*)h)->math = m;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t* m) {
    *m = ((Handle*)h)->pointers;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m) {
    ((Handle*)h)->pointers = m;
    return CUBLAS_STATUS_SUCCESS;
}

static bool bad_ld(cublasOperation_t a, cublasOperation_t b, long m, long n, long k, long la, long lb, long lc) {
    bool bad = la < std::max(1l, a == CUBLAS_OP_N ? m : k) || lb < std::max(1l, b == CUBLAS_OP_N ? k : n) ||
               lc < std::max(1l, m);
    if (bad) fault("BAD PRODUCT: leading dimensions %ld %ld %ld for %ld %ld %ld", la, lb, lc, m, n, k);
    return bad;
}

#define CHECK \
    if (bad_ld(a, b, m, n, k, la, lb, lc)) return CUBLAS_STATUS_INVALID_VALUE

FK cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,
                               const void*, const void*, cudaDataType, int la, const void*, cudaDataType, int lb,
                               const void*, void*, cudaDataType, int lc, cublasComputeType_t, cublasGemmAlgo_t) {
    CHECK;
    return product(h, "cublasGemmEx", m, n, k, 1);
}

FK cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t a, cublasOperation_t b, int m, int n,
                                             int k, const void*, const void*, cudaDataType, int la, long long,
                                             const void*, cudaDataType, int lb, long long, const void*, void*,
                                             cudaDataType, int lc, long long, int count, cublasComputeType_t,
                                             cublasGemmAlgo_t) {
    CHECK;
    return product(h, "cublasGemmStridedBatchedEx", m, n, k, count);
}

FK cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,
                                 const float*, const float*, int la, const float*, int lb, const float*, float*,
                                 int lc) {
    CHECK;
    return product(h, "cublasSgemm", m, n, k, 1);
}

FK cublasStatus_t cublasDgemm_v2(cublasHandle_t h, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,
                                 const double*, const double*, int la, const double*, int lb, const double*, double*,
                                 int lc) {
    CHECK;
    return product(h, "cublasDgemm", m, n, k, 1);
}

FK cublasStatus_t cublasSgemmEx(cublasHandle_t h, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,
                                const float*, const void*, cudaDataType, int la, const void*, cudaDataType, int lb,
                                const float*, void*, cudaDataType, int lc) {
    CHECK;
    return product(h, "cublasSgemmEx", m, n, k, 1);
}

FK cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t a, cublasOperation_t b, int m, int n,
                                            int k, const float*, const float*, int la, long long, const float*, int lb,
                                            long long, const float*, float*, int lc, long long, int count) {
    CHECK;
    return product(h, "cublasSgemmStridedBatched", m, n, k, count);
}

FK cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t h, cublasOperation_t a, cublasOperation_t b, int m, int n,
                                            int k, const double*, const double*, int la, long long, const double*,
                                            int lb, long long, const double*, double*, int lc, long long, int count) {
    CHECK;
    return product(h, "cublasDgemmStridedBatched", m, n, k, count);
}

FK cublasStatus_t cublasSgemv_v2(cublasHandle_t h, cublasOperation_t, int m, int n, const float*, const float*, int,
                                 const float*, int, const float*, float*, int) {
    return product(h, "cublasSgemv", m, n, 1, 1);
}

FK cublasStatus_t cublasDgemv_v2(cublasHandle_t h, cublasOperation_t, int m, int n, const double*, const double*, int,
                                 const double*, int, const double*, double*, int) {
    return product(h, "cublasDgemv", m, n, 1, 1);
}
