// cuDNN stub: backend (graph) API with one engine config; descriptors are plain records.
// STUB_CUDNN_WS=bytes        workspace that every convolution plan asks (default 0)
// STUB_CUDNN_BN_RESERVE=bytes STUB_CUDNN_BN_WS=bytes  batch norm
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <stdint.h>
#include <cudnn.h>
#define EXP __attribute__((visibility("default")))
static size_t env(const char *n) {
    const char *e = getenv(n);
    return e ? strtoull(e, 0, 0) : 0;
}
EXP size_t cudnnGetVersion(void) { return 92400; }
EXP size_t cudnnGetCudartVersion(void) { return 13000; }
EXP cudnnStatus_t cudnnGetProperty(libraryPropertyType t, int *v) {
    *v = t == MAJOR_VERSION ? 9 : t == MINOR_VERSION ? 24 : 0;
    return 0;
}
EXP const char *cudnnGetErrorString(cudnnStatus_t s) {
    return s ? "CUDNN_STUB_ERROR" : "CUDNN_STATUS_SUCCESS";
}
EXP void cudnnGetLastErrorString(char *m, size_t n) {
    if (n) *m = 0;
}
EXP cudnnStatus_t cudnnCreate(cudnnHandle_t *h) {
    *h = calloc(1, 64);
    return 0;
}
EXP cudnnStatus_t cudnnDestroy(cudnnHandle_t h) { return 0; }
EXP cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) {
    *(cudaStream_t *)h = s;
    return 0;
}
EXP cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t *s) {
    *s = *(cudaStream_t *)h;
    return 0;
}
#define MK(N, T)                                                                                   \
    EXP cudnnStatus_t cudnnCreate##N(T *d) {                                                       \
        *d = calloc(1, 1024);                                                                      \
        return 0;                                                                                  \
    }                                                                                              \
    EXP cudnnStatus_t cudnnDestroy##N(T d) {                                                       \
        free(d);                                                                                   \
        return 0;                                                                                  \
    }
MK(TensorDescriptor, cudnnTensorDescriptor_t)
MK(FilterDescriptor, cudnnFilterDescriptor_t)
    MK(ConvolutionDescriptor, cudnnConvolutionDescriptor_t)
        MK(ActivationDescriptor, cudnnActivationDescriptor_t)
            MK(DropoutDescriptor, cudnnDropoutDescriptor_t) MK(RNNDescriptor, cudnnRNNDescriptor_t)
                MK(RNNDataDescriptor, cudnnRNNDataDescriptor_t)
                    MK(CTCLossDescriptor, cudnnCTCLossDescriptor_t)
                        MK(SpatialTransformerDescriptor, cudnnSpatialTransformerDescriptor_t)
                            MK(PoolingDescriptor, cudnnPoolingDescriptor_t)
    // backend API
    typedef struct {
    int type;
} B;
EXP cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t t,
                                               cudnnBackendDescriptor_t *d) {
    B *b = calloc(1, 256);
    b->type = t;
    *d = b;
    return 0;
}
EXP cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
    free(d);
    return 0;
}
EXP cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t d) { return 0; }
EXP cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) { return 0; }
EXP cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d,
                                           cudnnBackendAttributeName_t n,
                                           cudnnBackendAttributeType_t t, int64_t c,
                                           const void *a) {
    return 0;
}
EXP cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t p,
                                      cudnnBackendDescriptor_t v) {
    return 0;
}
EXP cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d,
                                           cudnnBackendAttributeName_t n,
                                           cudnnBackendAttributeType_t t, int64_t req, int64_t *cnt,
                                           void *out) {
    int64_t c = 0;
    switch ((int)n) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
    case CUDNN_ATTR_ENGINECFG_ENGINE: c = 1; break; // the caller's own descriptors stand in
    case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES:
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE:
    case CUDNN_ATTR_ENGINE_KNOB_INFO: c = 0; break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
        if (out && req) *(int64_t *)out = (int64_t)env("STUB_CUDNN_WS");
        c = 1;
        break;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
        if (out && req) *(int64_t *)out = 1;
        c = 1;
        break;
    default:
        if (out && req && t == CUDNN_TYPE_INT64) {
            *(int64_t *)out = 0;
            c = 1;
        } else if (out && req && t != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
            memset(out, 0, 4);
            c = 1;
        } else c = 1;
    }
    if (cnt) *cnt = c;
    return 0;
}
// batch norm
EXP cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y,
    const cudnnTensorDescriptor_t b, const cudnnActivationDescriptor_t a, size_t *n) {
    *n = env("STUB_CUDNN_BN_WS");
    return 0;
}
EXP cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy,
    const cudnnTensorDescriptor_t dz, const cudnnTensorDescriptor_t dx,
    const cudnnTensorDescriptor_t db, const cudnnActivationDescriptor_t a, size_t *n) {
    *n = env("STUB_CUDNN_BN_WS");
    return 0;
}
EXP cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o,
    const cudnnActivationDescriptor_t a, const cudnnTensorDescriptor_t x, size_t *n) {
    *n = env("STUB_CUDNN_BN_RESERVE");
    return 0;
}
// legacy convolution queries
EXP cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t h,
                                                          const cudnnTensorDescriptor_t x,
                                                          const cudnnFilterDescriptor_t w,
                                                          const cudnnConvolutionDescriptor_t c,
                                                          const cudnnTensorDescriptor_t y,
                                                          cudnnConvolutionFwdAlgo_t al, size_t *n) {
    *n = env("STUB_CUDNN_WS");
    return 0;
}
EXP cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(
    cudnnHandle_t h, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t c, const cudnnTensorDescriptor_t dx,
    cudnnConvolutionBwdDataAlgo_t al, size_t *n) {
    *n = env("STUB_CUDNN_WS");
    return 0;
}
EXP cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(
    cudnnHandle_t h, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t c, const cudnnFilterDescriptor_t dw,
    cudnnConvolutionBwdFilterAlgo_t al, size_t *n) {
    *n = env("STUB_CUDNN_WS");
    return 0;
}
EXP cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t h, size_t *n) {
    *n = 1 << 20;
    return 0;
}
// RNN queries are refused: run LSTM/GRU with cuDNN off
EXP cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t h, cudnnRNNDescriptor_t r, size_t *n) {
    return CUDNN_STATUS_NOT_SUPPORTED;
}
EXP cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t h, cudnnRNNDescriptor_t r,
                                            cudnnForwardMode_t f, cudnnRNNDataDescriptor_t x,
                                            size_t *w, size_t *s) {
    return CUDNN_STATUS_NOT_SUPPORTED;
}
