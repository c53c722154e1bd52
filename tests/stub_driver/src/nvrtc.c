// The runtime compiler: accepts every program and returns an empty image. PyTorch compiles some
// elementwise kernels (lgamma, i0 ...) when they are first used; the driver stub launches nothing.
#include <stddef.h>
#include <string.h>
#include <nvrtc.h>
#define EXP __attribute__((visibility("default")))
EXP nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
EXP nvrtcResult nvrtcCreateProgram(nvrtcProgram *p, const char *src, const char *name, int n,
                                   const char *const *headers, const char *const *names) {
    *p = (nvrtcProgram)0x70;
    return 0;
}
EXP nvrtcResult nvrtcDestroyProgram(nvrtcProgram *p) { return 0; }
EXP nvrtcResult nvrtcCompileProgram(nvrtcProgram p, int n, const char *const *options) { return 0; }
EXP nvrtcResult nvrtcAddNameExpression(nvrtcProgram p, const char *name) { return 0; }
EXP nvrtcResult nvrtcGetLoweredName(nvrtcProgram p, const char *name, const char **lowered) {
    *lowered = "kernel";
    return 0;
}
static nvrtcResult one(size_t *n) {
    *n = 1;
    return 0;
}
static nvrtcResult empty(char *text) {
    *text = 0;
    return 0;
}
EXP nvrtcResult nvrtcGetPTXSize(nvrtcProgram p, size_t *n) { return one(n); }
EXP nvrtcResult nvrtcGetPTX(nvrtcProgram p, char *text) { return empty(text); }
EXP nvrtcResult nvrtcGetCUBINSize(nvrtcProgram p, size_t *n) { return one(n); }
EXP nvrtcResult nvrtcGetCUBIN(nvrtcProgram p, char *image) { return empty(image); }
EXP nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram p, size_t *n) { return one(n); }
EXP nvrtcResult nvrtcGetProgramLog(nvrtcProgram p, char *text) { return empty(text); }
