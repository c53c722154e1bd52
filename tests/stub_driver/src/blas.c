#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <cublas_v2.h>
#include <cublasLt.h>
#define EXP __attribute__((visibility("default")))
EXP cublasStatus_t cublasCreate_v2(cublasHandle_t *h) {
    *h = calloc(1, 256);
    return 0;
}
EXP cublasStatus_t cublasDestroy_v2(cublasHandle_t h) { return 0; }
EXP cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *m) {
    *m = CUBLAS_DEFAULT_MATH;
    return 0;
}
EXP cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *m) {
    *m = CUBLAS_POINTER_MODE_HOST;
    return 0;
}
EXP cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *p, size_t n) {
    if (getenv("STUB_TRACE")) fprintf(stderr, "[stub] cublasSetWorkspace %p %zu\n", p, n);
    return 0;
}
EXP size_t cublasLtGetVersion(void) { return 130101; }
EXP cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t c,
                                            cudaDataType_t s) {
    *d = calloc(1, 512);
    return 0;
}
EXP cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    free(d);
    return 0;
}
EXP cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *d, cudaDataType t, uint64_t r,
                                              uint64_t c, int64_t ld) {
    *d = calloc(1, 512);
    return 0;
}
EXP cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t d) {
    free(d);
    return 0;
}
EXP cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *d) {
    *d = calloc(1, 512);
    return 0;
}
EXP cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t d) {
    free(d);
    return 0;
}
EXP cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t h, cublasLtMatmulDesc_t o, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int req,
    cublasLtMatmulHeuristicResult_t r[], int *n) {
    memset(&r[0], 0, sizeof r[0]);
    r[0].state = CUBLAS_STATUS_SUCCESS;
    r[0].wavesCount = 1.f;
    *n = 1;
    return 0;
}
EXP cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *a,
                                                        cublasLtMatmulAlgoConfigAttributes_t t,
                                                        void *b, size_t n, size_t *w) {
    memset(b, 0, n);
    if (w) *w = n;
    return 0;
}
