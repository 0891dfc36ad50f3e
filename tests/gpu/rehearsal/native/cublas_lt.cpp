// libcublasLt.so.13: the documented calls of torch; each product is one launch, refused where an H100 has none.
// Its prototypes name these types, whose own header asks for more than pip's packages bring.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
struct __half;
struct __nv_bfloat16;
#include <cublasLt.h>

#include <cstring>
#include <map>
#include <vector>

#include "fake.h"
using namespace fk;

struct Desc {
    std::map<int, std::vector<char>> attributes;
};

struct Layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
};

FK size_t cublasLtGetVersion() { return 130100; }

FK cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t) {
    *d = (cublasLtMatmulDesc_t) new Desc;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    delete (Desc*)d;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a,
                                                 const void* p, size_t n) {
    ((Desc*)d)->attributes[a].assign((const char*)p, (const char*)p + n);
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    *p = (cublasLtMatmulPreference_t) new Desc;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete (Desc*)p;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                       cublasLtMatmulPreferenceAttributes_t a, const void* v,
                                                       size_t n) {
    ((Desc*)p)->attributes[a].assign((const char*)v, (const char*)v + n);
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType t, uint64_t r, uint64_t c,
                                             int64_t ld) {
    *l = (cublasLtMatrixLayout_t) new Layout{t, r, c, ld};
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    delete (Layout*)l;
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void*,
                                                   size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

static int op(Desc* d, int which) {
    auto it = d->attributes.find(which);
    return it == d->attributes.end() ? CUBLAS_OP_N : *(int*)it->second.data();
}

static cublasStatus_t fits(Desc* d, Layout* a, Layout* b, Layout* c) {
    if (a->type == CUDA_R_8F_E4M3 || a->type == CUDA_R_8F_E5M2 || b->type == CUDA_R_8F_E4M3 ||
        b->type == CUDA_R_8F_E5M2) {  // compute capability 9.0: TN, multiples of 16 bytes
        bool tn =
            op(d, CUBLASLT_MATMUL_DESC_TRANSA) == CUBLAS_OP_T && op(d, CUBLASLT_MATMUL_DESC_TRANSB) == CUBLAS_OP_N;
        if (!tn || a->ld % 16 || b->ld % 16 || a->rows % 16 || c->rows % 16 ||
            (a->type == CUDA_R_8F_E5M2 && b->type == CUDA_R_8F_E5M2)) {
            fault("BAD fp8 PRODUCT: rows %lu ld %ld %ld tn %d", (unsigned long)c->rows, (long)a->ld, (long)b->ld, tn);
            return CUBLAS_STATUS_NOT_SUPPORTED;
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}

FK cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                                 cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                 cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int asked,
                                                 cublasLtMatmulHeuristicResult_t* r, int* found) {
    api("cublasLtMatmulAlgoGetHeuristic");
    cublasStatus_t s = fits((Desc*)d, (Layout*)a, (Layout*)b, (Layout*)c);
    *found = s ? 0 : 1;
    if (!s && asked) {
        memset(r, 0, sizeof *r);
        r->state = CUBLAS_STATUS_SUCCESS;
    }
    return s;
}

FK cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void*, const void* A,
                                 cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void*,
                                 const void*, cublasLtMatrixLayout_t, void* D, cublasLtMatrixLayout_t c,
                                 const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t s) {
    auto st = fits((Desc*)d, (Layout*)a, (Layout*)b, (Layout*)c);
    if (st) return st;
    if (((uintptr_t)A | (uintptr_t)B | (uintptr_t)D) % 16)
        fault("product on addresses that are not aligned to 16: %p %p %p", A, B, D);
    bool f8 = ((Layout*)a)->type == CUDA_R_8F_E4M3;
    bool scaled = ((Desc*)d)->attributes.count(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
    return launch(s, f8 ? (scaled ? "cublasLtMatmul fp8" : "cublasLtMatmul fp8 unscaled") : "cublasLtMatmul", 1, 1, 1,
                  128, 1, 1, 0, 1)
               ? CUBLAS_STATUS_EXECUTION_FAILED
               : CUBLAS_STATUS_SUCCESS;
}
