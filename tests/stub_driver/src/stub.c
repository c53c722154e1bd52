// Stub of the CUDA runtime, driver API and NVML: devices that hand out addresses and run nothing.
//
// STUB_DEVICE    which card: a100 (default), a100-40, h100, h200, t4, l4, rtx4090, v100
// STUB_DEVICES   how many of them (default 1, at most 8)
// STUB_MEM_GIB, STUB_MEM_BYTES   capacity of each, instead of the card's own
// STUB_CONTEXT_MB                what a CUDA context takes of it (default 500)
// STUB_TRACE=1, STUB_KERNELS=1, STUB_TRACE_FILE, STUB_STATS=1   what was called, to stderr
// STUB_D2H_HEX   byte pattern that device reads return (default zeros)
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL_NO
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <pthread.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <cuda_runtime_api.h>
#include <cuda.h>
#define EXP __attribute__((visibility("default")))
typedef struct {
    const char *key, *name;
    int major, minor, sms;
    size_t mem, l2;
    int smem_optin, smem_sm, thr_sm, blk_sm, binver;
    int clock_khz, memclk_khz, bus;
} Dev;
static const Dev devs[] = {
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 84987740160ull, 41943040, 166912, 167936, 2048, 32,
     80, 1410000, 1593000, 5120},
    {"a100-40", "NVIDIA A100-SXM4-40GB", 8, 0, 108, 42298834944ull, 41943040, 166912, 167936, 2048,
     32, 80, 1410000, 1215000, 5120},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 84942979072ull, 52428800, 232448, 233472, 2048, 32,
     90, 1980000, 2619000, 5120},
    {"h200", "NVIDIA H200", 9, 0, 132, 150110011392ull, 62914560, 232448, 233472, 2048, 32, 90,
     1980000, 3201000, 6144},
    {"t4", "Tesla T4", 7, 5, 40, 15828320256ull, 4194304, 65536, 65536, 1024, 16, 75, 1590000,
     5001000, 256},
    {"l4", "NVIDIA L4", 8, 9, 58, 23654825984ull, 50331648, 101376, 102400, 1536, 24, 86, 2040000,
     6251000, 192},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 25393692672ull, 75497472, 101376, 102400,
     1536, 24, 86, 2520000, 10501000, 384},
    {"v100", "Tesla V100-SXM2-32GB", 7, 0, 80, 34089730048ull, 6291456, 98304, 98304, 2048, 32, 70,
     1530000, 877000, 4096},
};
static const Dev *D;
static size_t cap, ctx_overhead;
static int trace, klog;
static FILE *tf;
static unsigned char pat[16];
static int patn = 1;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static __thread int last_err;
static __thread int cur_dev;
#define MAX_DEVICES 8
static int n_dev = 1;
static uintptr_t va_base, va_end, va_next;
static size_t used[MAX_DEVICES], n_malloc, n_free, n_launch;
#define TR(...)                                                                                    \
    do {                                                                                           \
        if (trace) { fprintf(tf, __VA_ARGS__); }                                                   \
    } while (0)
typedef struct {
    uintptr_t a;
    size_t n;
    int dev; // -1: reserved address space
} Rng;
static Rng *rs;
static int nr, cr;
static Rng *fr;
static int nf, cf;
static Rng *hs;
static int nh, ch;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void fini(void) {
    if (getenv("STUB_STATS"))
        fprintf(stderr,
                "[stub] cudaMalloc=%zu cudaFree=%zu launches=%zu device_used=%zu\n", n_malloc,
                n_free, n_launch, used[0]);
    if (tf && tf != stderr) fflush(tf);
}
static void init(void) {
    const char *e = getenv("STUB_DEVICE");
    if (!e || !*e) e = "a100";
    D = &devs[0];
    for (size_t i = 0; i < sizeof devs / sizeof *devs; i++)
        if (!strcmp(e, devs[i].key)) D = &devs[i];
    cap = D->mem;
    if ((e = getenv("STUB_DEVICES"))) n_dev = atoi(e);
    if (n_dev < 1 || n_dev > MAX_DEVICES) n_dev = 1;
    if ((e = getenv("STUB_MEM_BYTES"))) cap = strtoull(e, 0, 0);
    if ((e = getenv("STUB_MEM_GIB"))) cap = (size_t)(atof(e) * (double)(1ull << 30));
    ctx_overhead = (size_t)500 << 20;
    if ((e = getenv("STUB_CONTEXT_MB"))) ctx_overhead = (size_t)atol(e) << 20;
    if ((e = getenv("STUB_TRACE"))) { trace = atoi(e); }
    if ((e = getenv("STUB_KERNELS"))) klog = atoi(e);
    tf = stderr;
    if ((e = getenv("STUB_TRACE_FILE"))) {
        tf = fopen(e, "a");
        if (!tf) tf = stderr;
    }
    if ((e = getenv("STUB_D2H_HEX"))) {
        patn = 0;
        for (; e[0] && e[1] && patn < 16; e += 2) {
            unsigned v;
            sscanf(e, "%2x", &v);
            pat[patn++] = v;
        }
        if (!patn) patn = 1;
    }
    size_t sz = (size_t)4 << 40;
    void *p = MAP_FAILED;
    while (sz >= ((size_t)256 << 30)) {
        p = mmap((void *)0x7e0000000000ull, sz, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) break;
        sz >>= 1;
    }
    if (p == MAP_FAILED) {
        va_base = 0x600000000000ull;
        sz = (size_t)4 << 40;
    } else va_base = ((uintptr_t)p + 0x1ffffff) & ~(uintptr_t)0x1ffffff;
    va_next = va_base;
    va_end = va_base + sz - ((size_t)64 << 20);
    atexit(fini);
}
#define INIT pthread_once(&once, init)
static void push(Rng **v, int *n, int *c, Rng r) {
    if (*n == *c) {
        *c = *c ? *c * 2 : 256;
        *v = realloc(*v, *c * sizeof(Rng));
    }
    (*v)[(*n)++] = r;
}
// First fit over free ranges (kept sorted by address, merged), then bump.
static uintptr_t va_alloc(size_t n, size_t al, int dev) {
    for (int i = 0; i < nf; i++) {
        uintptr_t a = (fr[i].a + al - 1) & ~(uintptr_t)(al - 1);
        if (a + n <= fr[i].a + fr[i].n) {
            Rng o = fr[i];
            memmove(fr + i, fr + i + 1, (nf - i - 1) * sizeof(Rng));
            nf--;
            if (a > o.a) {
                push(&fr, &nf, &cf, (Rng){0});
                memmove(fr + i + 1, fr + i, (nf - 1 - i) * sizeof(Rng));
                fr[i] = (Rng){o.a, a - o.a, 0};
                i++;
            }
            if (a + n < o.a + o.n) {
                push(&fr, &nf, &cf, (Rng){0});
                memmove(fr + i + 1, fr + i, (nf - 1 - i) * sizeof(Rng));
                fr[i] = (Rng){a + n, o.a + o.n - a - n, 0};
            }
            push(&rs, &nr, &cr, (Rng){a, n, dev});
            return a;
        }
    }
    uintptr_t a = (va_next + al - 1) & ~(uintptr_t)(al - 1);
    if (a + n > va_end) return 0;
    va_next = a + n;
    push(&rs, &nr, &cr, (Rng){a, n, dev});
    return a;
}
static Rng va_free(uintptr_t a) {
    for (int i = 0; i < nr; i++)
        if (rs[i].a == a) {
            Rng r = rs[i];
            rs[i] = rs[--nr];
            int j = 0;
            while (j < nf && fr[j].a < a) j++;
            push(&fr, &nf, &cf, (Rng){0});
            memmove(fr + j + 1, fr + j, (nf - 1 - j) * sizeof(Rng));
            fr[j] = (Rng){r.a, r.n, 0};
            if (j + 1 < nf && fr[j].a + fr[j].n == fr[j + 1].a) {
                fr[j].n += fr[j + 1].n;
                memmove(fr + j + 1, fr + j + 2, (nf - j - 2) * sizeof(Rng));
                nf--;
            }
            if (j > 0 && fr[j - 1].a + fr[j - 1].n == fr[j].a) {
                fr[j - 1].n += fr[j].n;
                memmove(fr + j, fr + j + 1, (nf - j - 1) * sizeof(Rng));
                nf--;
            }
            return r;
        }
    return (Rng){0, 0, -1};
}
static int device_of(const void *p) {
    int dev = 0;
    pthread_mutex_lock(&mu);
    for (int i = 0; i < nr; i++)
        if ((uintptr_t)p >= rs[i].a && (uintptr_t)p < rs[i].a + rs[i].n) dev = rs[i].dev;
    pthread_mutex_unlock(&mu);
    return dev < 0 ? 0 : dev;
}
static int is_dev(const void *p) {
    uintptr_t a = (uintptr_t)p;
    return a >= va_base && a < va_end && va_base;
}
static cudaError_t fail(cudaError_t e) {
    last_err = e;
    return e;
}
static void fillhost(void *p, size_t n) {
    if (patn == 1) memset(p, pat[0], n);
    else
        for (size_t i = 0; i < n; i++) ((char *)p)[i] = pat[i % patn];
}
static size_t rnd(size_t n) { return (n + 0x1fffff) & ~(size_t)0x1fffff; }

// ---------------- memory
EXP cudaError_t cudaMalloc(void **p, size_t n) {
    INIT;
    if (!n) {
        *p = 0;
        return 0;
    }
    pthread_mutex_lock(&mu);
    // Requests are placed on 2 MiB pages (PyTorch asks multiples of 2 MiB).
    size_t m = rnd(n);
    if (used[cur_dev] + m + ctx_overhead > cap) {
        pthread_mutex_unlock(&mu);
        TR("[stub] cudaMalloc %zu -> OOM (used %zu)\n", n, used[cur_dev]);
        *p = 0;
        return fail(cudaErrorMemoryAllocation);
    }
    uintptr_t a = va_alloc(m, (size_t)2 << 20, cur_dev);
    if (!a) {
        pthread_mutex_unlock(&mu);
        return fail(cudaErrorMemoryAllocation);
    }
    used[cur_dev] += m;
    n_malloc++;
    *p = (void *)a;
    pthread_mutex_unlock(&mu);
    TR("[stub] cudaMalloc %zu -> %p used=%zu\n", n, *p, used[cur_dev]);
    return 0;
}
EXP cudaError_t cudaFree(void *p) {
    INIT;
    if (!p) return 0;
    pthread_mutex_lock(&mu);
    Rng r = va_free((uintptr_t)p);
    if (r.n && r.dev >= 0) {
        used[r.dev] -= r.n;
        n_free++;
    }
    pthread_mutex_unlock(&mu);
    TR("[stub] cudaFree %p %zu\n", p, r.n);
    return r.n ? 0 : fail(cudaErrorInvalidValue);
}
EXP cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
EXP cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
EXP cudaError_t cudaMallocManaged(void **p, size_t n, unsigned f) { return cudaMalloc(p, n); }
EXP cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
    INIT;
    size_t u = used[cur_dev] + ctx_overhead;
    if (f) *f = cap > u ? cap - u : 0;
    if (t) *t = cap;
    return 0;
}
static void host_add(void *p, size_t n) {
    pthread_mutex_lock(&mu);
    push(&hs, &nh, &ch, (Rng){(uintptr_t)p, n, 0});
    pthread_mutex_unlock(&mu);
}
static int host_del(void *p) {
    int k = 0;
    pthread_mutex_lock(&mu);
    for (int i = 0; i < nh; i++)
        if (hs[i].a == (uintptr_t)p) {
            hs[i] = hs[--nh];
            k = 1;
            break;
        }
    pthread_mutex_unlock(&mu);
    return k;
}
static int host_has(const void *p) {
    int k = 0;
    pthread_mutex_lock(&mu);
    for (int i = 0; i < nh; i++)
        if ((uintptr_t)p >= hs[i].a && (uintptr_t)p < hs[i].a + hs[i].n) {
            k = 1;
            break;
        }
    pthread_mutex_unlock(&mu);
    return k;
}
EXP cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) {
    INIT;
    if (posix_memalign(p, 4096, n ? n : 1)) return fail(cudaErrorMemoryAllocation);
    host_add(*p, n);
    return 0;
}
EXP cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
EXP cudaError_t cudaFreeHost(void *p) {
    host_del(p);
    free(p);
    return 0;
}
EXP cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) {
    INIT;
    host_add(p, n);
    return 0;
}
EXP cudaError_t cudaHostUnregister(void *p) {
    host_del(p);
    return 0;
}
EXP cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned f) {
    *d = h;
    return 0;
}
EXP cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    INIT;
    memset(a, 0, sizeof *a);
    if (is_dev(p)) {
        a->type = cudaMemoryTypeDevice;
        a->device = device_of(p);
        a->devicePointer = (void *)p;
    } else if (host_has(p)) {
        a->type = cudaMemoryTypeHost;
        a->devicePointer = (void *)p;
        a->hostPointer = (void *)p;
    } else {
        a->type = cudaMemoryTypeUnregistered;
        a->device = -2;
        a->hostPointer = (void *)p;
    }
    return 0;
}
static void cpy(void *d, const void *s, size_t n) {
    INIT;
    int dd = is_dev(d), sd = is_dev(s);
    TR("[stub] memcpy %s->%s %zu\n", sd ? "D" : "H", dd ? "D" : "H", n);
    if (dd) return;
    if (sd) fillhost(d, n);
    else memmove(d, s, n);
}
EXP cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
    cpy(d, s, n);
    return 0;
}
EXP cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k,
                                cudaStream_t st) {
    cpy(d, s, n);
    return 0;
}
EXP cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h,
                                  enum cudaMemcpyKind k, cudaStream_t st) {
    for (size_t i = 0; i < h; i++) cpy((char *)d + i * dp, (const char *)s + i * sp, w);
    return 0;
}
EXP cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n,
                                    cudaStream_t st) {
    return 0;
}
EXP cudaError_t cudaMemcpyToSymbol(const void *sym, const void *src, size_t n, size_t off,
                                   enum cudaMemcpyKind k) {
    return 0;
}
EXP cudaError_t cudaMemcpyToSymbolAsync(const void *sym, const void *src, size_t n, size_t off,
                                        enum cudaMemcpyKind k, cudaStream_t s) {
    return 0;
}
EXP cudaError_t cudaMemset(void *d, int v, size_t n) {
    INIT;
    if (!is_dev(d)) memset(d, v, n);
    return 0;
}
EXP cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) {
    return cudaMemset(d, v, n);
}
EXP cudaError_t cudaGetSymbolAddress(void **p, const void *sym) {
    INIT;
    static char *sy;
    if (!sy) {
        pthread_mutex_lock(&mu);
        if (!sy) sy = (char *)va_alloc((size_t)2 << 20, (size_t)2 << 20, -1);
        pthread_mutex_unlock(&mu);
    }
    *p = sy;
    return 0;
}
EXP cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
    memset(h, 0, sizeof *h);
    memcpy(h, &p, sizeof p);
    return 0;
}
EXP cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) {
    memcpy(p, &h, sizeof *p);
    return 0;
}
EXP cudaError_t cudaIpcCloseMemHandle(void *p) { return 0; }
EXP cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) {
    memset(h, 0, sizeof *h);
    return 0;
}
EXP cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) {
    *e = malloc(8);
    return 0;
}
EXP cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
    *p = (cudaMemPool_t)0x10;
    return 0;
}
EXP cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
    INIT;
    *(uint64_t *)v = used[cur_dev];
    return 0;
}
EXP cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
    return 0;
}
EXP cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *d, size_t c) {
    return 0;
}
EXP cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { return 0; }
EXP cudaError_t cudaDeviceGetGraphMemAttribute(int d, enum cudaGraphMemAttributeType a, void *v) {
    *(uint64_t *)v = 0;
    return 0;
}
EXP cudaError_t cudaDeviceSetGraphMemAttribute(int d, enum cudaGraphMemAttributeType a, void *v) {
    return 0;
}

// ---------------- device
EXP cudaError_t cudaGetDeviceCount(int *n) {
    INIT;
    *n = n_dev;
    return 0;
}
EXP cudaError_t cudaGetDevice(int *d) {
    INIT;
    *d = cur_dev;
    return 0;
}
EXP cudaError_t cudaSetDevice(int d) {
    INIT;
    if (d < 0 || d >= n_dev) return fail(cudaErrorInvalidDevice);
    cur_dev = d;
    return 0;
}
EXP cudaError_t cudaGetLastError(void) {
    int e = last_err;
    last_err = 0;
    return e;
}
EXP cudaError_t cudaPeekAtLastError(void) { return last_err; }
EXP const char *cudaGetErrorName(cudaError_t e) {
    return e == 0 ? "cudaSuccess" : e == 2 ? "cudaErrorMemoryAllocation" : "cudaErrorStub";
}
EXP const char *cudaGetErrorString(cudaError_t e) {
    return e == 0 ? "no error" : e == 2 ? "out of memory" : "stub error";
}
EXP cudaError_t cudaDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
EXP cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return 0;
}
EXP cudaError_t cudaDeviceSynchronize(void) { return 0; }
EXP cudaError_t cudaDeviceReset(void) { return 0; }
EXP cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) {
    *c = 0;
    return 0;
}
EXP cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned f) { return 0; }
EXP cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) {
    if (l) *l = 0;
    if (g) *g = -5;
    return 0;
}
EXP cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "0000:00:04.0");
    return 0;
}
EXP cudaError_t cudaDeviceGetLimit(size_t *v, enum cudaLimit l) {
    *v = l == cudaLimitStackSize ? 1024 : 8388608;
    return 0;
}
EXP cudaError_t cudaDeviceSetLimit(enum cudaLimit l, size_t v) { return 0; }
EXP cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    INIT;
    if (d < 0 || d >= n_dev) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strncpy(p->name, D->name, 255);
    memcpy(p->uuid.bytes, "stubstubstubstub", 16);
    p->uuid.bytes[15] += d;
    p->totalGlobalMem = cap;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->memPitch = 2147483647;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = D->major;
    p->minor = D->minor;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->multiProcessorCount = D->sms;
    p->canMapHostMemory = 1;
    p->maxTexture1D = 131072;
    p->concurrentKernels = 1;
    p->ECCEnabled = 1;
    p->pciBusID = 0;
    p->pciDeviceID = 4;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = 1;
    p->memoryBusWidth = D->bus;
    p->l2CacheSize = (int)D->l2;
    p->persistingL2CacheMaxSize = (int)(D->l2 * 3 / 4);
    p->maxThreadsPerMultiProcessor = D->thr_sm;
    p->streamPrioritiesSupported = 1;
    p->globalL1CacheSupported = 1;
    p->localL1CacheSupported = 1;
    p->sharedMemPerMultiprocessor = D->smem_sm;
    p->regsPerMultiprocessor = 65536;
    p->managedMemory = 1;
    p->hostNativeAtomicSupported = 0;
    p->pageableMemoryAccess = 0;
    p->concurrentManagedAccess = 1;
    p->computePreemptionSupported = 1;
    p->canUseHostPointerForRegisteredMem = 1;
    p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = D->smem_optin;
    p->maxBlocksPerMultiProcessor = D->blk_sm;
    p->accessPolicyMaxWindowSize = 134213632;
    p->reservedSharedMemPerBlock = D->major >= 8 ? 1024 : 0;
    p->hostRegisterSupported = 1;
    p->memoryPoolsSupported = 1;
    return 0;
}
EXP cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    INIT;
    int r = 0;
    switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: r = 1024; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: r = 1024; break;
    case cudaDevAttrMaxBlockDimZ: r = 64; break;
    case cudaDevAttrMaxGridDimX: r = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: r = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: r = 49152; break;
    case cudaDevAttrTotalConstantMemory: r = 65536; break;
    case cudaDevAttrWarpSize: r = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: r = 65536; break;
    case cudaDevAttrClockRate: r = D->clock_khz; break;
    case cudaDevAttrTextureAlignment: r = 512; break;
    case cudaDevAttrMultiProcessorCount: r = D->sms; break;
    case cudaDevAttrCanMapHostMemory: r = 1; break;
    case cudaDevAttrConcurrentKernels: r = 1; break;
    case cudaDevAttrEccEnabled: r = 1; break;
    case cudaDevAttrPciDeviceId: r = 4; break;
    case cudaDevAttrMemoryClockRate: r = D->memclk_khz; break;
    case cudaDevAttrGlobalMemoryBusWidth: r = D->bus; break;
    case cudaDevAttrL2CacheSize: r = (int)D->l2; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: r = D->thr_sm; break;
    case cudaDevAttrAsyncEngineCount: r = 3; break;
    case cudaDevAttrUnifiedAddressing: r = 1; break;
    case cudaDevAttrComputeCapabilityMajor: r = D->major; break;
    case cudaDevAttrComputeCapabilityMinor: r = D->minor; break;
    case cudaDevAttrStreamPrioritiesSupported: r = 1; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: r = D->smem_sm; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: r = 65536; break;
    case cudaDevAttrManagedMemory: r = 1; break;
    case cudaDevAttrConcurrentManagedAccess: r = 1; break;
    case cudaDevAttrComputePreemptionSupported: r = 1; break;
    case cudaDevAttrCooperativeLaunch: r = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: r = D->smem_optin; break;
    case cudaDevAttrHostRegisterSupported: r = 1; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: r = D->blk_sm; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: r = D->major >= 8 ? 1024 : 0; break;
    case cudaDevAttrMemoryPoolsSupported: r = 1; break;
    case cudaDevAttrMaxPersistingL2CacheSize: r = (int)(D->l2 * 3 / 4); break;
    default: r = 0; TR("[stub] attr %d -> 0\n", (int)a);
    }
    *v = r;
    return 0;
}

// ---------------- streams, events
static void *new_stream(void) { // begins with its device
    int *s = calloc(1, 64);
    *s = cur_dev;
    return s;
}
EXP cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    INIT;
    *s = new_stream();
    return 0;
}
EXP cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
    *s = new_stream();
    return 0;
}
EXP cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = new_stream();
    return 0;
}
EXP cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
EXP cudaError_t cudaStreamQuery(cudaStream_t s) { return 0; }
EXP cudaError_t cudaStreamSynchronize(cudaStream_t s) { return 0; }
EXP cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return 0; }
EXP cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
    *p = 0;
    return 0;
}
EXP cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *f) {
    *f = 1;
    return 0;
}
EXP cudaError_t cudaStreamGetDevice(cudaStream_t s, int *d) {
    *d = (uintptr_t)s > 0x100 ? *(int *)s : cur_dev;
    return 0;
}
EXP cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *id) {
    *id = (uintptr_t)s;
    return 0;
}
EXP cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t cb, void *u,
                                      unsigned f) {
    cb(s, 0, u);
    return 0;
}
EXP cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *u) {
    fn(u);
    return 0;
}
EXP cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *st) {
    *st = cudaStreamCaptureStatusNone;
    return 0;
}
EXP cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *st,
                                         unsigned long long *id, cudaGraph_t *g,
                                         const cudaGraphNode_t **dep, const cudaGraphEdgeData **ed,
                                         size_t *nd) {
    *st = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (g) *g = 0;
    if (dep) *dep = 0;
    if (ed) *ed = 0;
    if (nd) *nd = 0;
    return 0;
}
EXP cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
EXP cudaError_t cudaEventCreate(cudaEvent_t *e) {
    *e = calloc(1, 64);
    return 0;
}
EXP cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
    *e = calloc(1, 64);
    return 0;
}
EXP cudaError_t cudaEventDestroy(cudaEvent_t e) {
    free(e);
    return 0;
}
EXP cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return 0; }
EXP cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return 0; }
EXP cudaError_t cudaEventQuery(cudaEvent_t e) { return 0; }
EXP cudaError_t cudaEventSynchronize(cudaEvent_t e) { return 0; }
EXP cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = 1.f;
    return 0;
}
EXP cudaError_t cudaProfilerStart(void) { return 0; }
EXP cudaError_t cudaProfilerStop(void) { return 0; }

// ---------------- kernels
typedef struct {
    const void *f;
    const char *name;
} Fn;
static Fn *fn;
static size_t nfn, cfn;
static size_t hh(const void *p) {
    uint64_t x = (uintptr_t)p;
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    return x;
}
static void fput(const void *f, const char *n) {
    if (nfn * 2 >= cfn) {
        size_t oc = cfn;
        Fn *o = fn;
        cfn = cfn ? cfn * 2 : 1 << 16;
        fn = calloc(cfn, sizeof(Fn));
        nfn = 0;
        for (size_t i = 0; i < oc; i++)
            if (o[i].f) fput(o[i].f, o[i].name);
        free(o);
    }
    size_t i = hh(f) & (cfn - 1);
    while (fn[i].f && fn[i].f != f) i = (i + 1) & (cfn - 1);
    if (!fn[i].f) { nfn++; }
    fn[i].f = f;
    fn[i].name = n;
}
static const char *fget(const void *f) {
    if (!cfn) return "?";
    size_t i = hh(f) & (cfn - 1);
    while (fn[i].f) {
        if (fn[i].f == f) return fn[i].name;
        i = (i + 1) & (cfn - 1);
    }
    return "?";
}
static void *fb;
EXP void **__cudaRegisterFatBinary(void *f) {
    INIT;
    return &fb;
}
EXP void __cudaRegisterFatBinaryEnd(void **h) {}
EXP void __cudaUnregisterFatBinary(void **h) {}
EXP char __cudaInitModule(void **h) { return 1; }
EXP void __cudaRegisterVar(void **h, char *v, char *d, const char *n, int e, size_t s, int c,
                           int g) {}
EXP void __cudaRegisterManagedVar(void **h, void **v, char *d, const char *n, int e, size_t s,
                                  int c, int g) {}
EXP void __cudaRegisterFunction(void **h, const char *hf, char *df, const char *dn, int tl, void *t,
                                void *b, void *bd, void *gd, int *w) {
    if (klog) {
        pthread_mutex_lock(&mu);
        fput(hf, dn);
        pthread_mutex_unlock(&mu);
    }
}
static __thread struct {
    dim3 g, b;
    size_t s;
    cudaStream_t st;
} cfgs[16];
static __thread int ncfg;
EXP unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, struct CUstream_st *st) {
    if (ncfg < 16) {
        cfgs[ncfg].g = g;
        cfgs[ncfg].b = b;
        cfgs[ncfg].s = s;
        cfgs[ncfg].st = st;
        ncfg++;
    }
    return 0;
}
EXP cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *st) {
    if (ncfg > 0) {
        ncfg--;
        *g = cfgs[ncfg].g;
        *b = cfgs[ncfg].b;
        *s = cfgs[ncfg].s;
        *(cudaStream_t *)st = cfgs[ncfg].st;
    }
    return 0;
}
static cudaError_t launch(const void *f, dim3 g, dim3 b, size_t sh) {
    __sync_fetch_and_add(&n_launch, 1);
    if (klog)
        fprintf(tf, "[k] %s grid=%u,%u,%u block=%u,%u,%u smem=%zu\n", fget(f), g.x, g.y, g.z, b.x,
                b.y, b.z, sh);
    if ((size_t)b.x * b.y * b.z > 1024 || b.x == 0 || g.x == 0 || g.y == 0 || g.z == 0) {
        TR("[stub] bad launch config grid=%u,%u,%u block=%u,%u,%u\n", g.x, g.y, g.z, b.x, b.y, b.z);
        return fail(cudaErrorInvalidConfiguration);
    }
    return 0;
}
EXP cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
    *k = (cudaKernel_t)f;
    return 0;
}
EXP cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s,
                                   cudaStream_t st) {
    return launch((const void *)k, g, b, s);
}
EXP cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s,
                                 cudaStream_t st) {
    return launch(f, g, b, s);
}
EXP cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t s,
                                            cudaStream_t st) {
    return launch(f, g, b, s);
}
EXP cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
    return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes);
}
EXP cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    INIT;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = D->binver;
    a->maxDynamicSharedSizeBytes = D->smem_optin;
    return 0;
}
EXP cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) {
    INIT;
    if (a == cudaFuncAttributeMaxDynamicSharedMemorySize && v > D->smem_optin)
        return fail(cudaErrorInvalidValue);
    return 0;
}
EXP cudaError_t cudaFuncSetCacheConfig(const void *f, enum cudaFuncCache c) { return 0; }
EXP cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f,
                                                                       int bs, size_t sh,
                                                                       unsigned fl) {
    INIT;
    int m = D->blk_sm;
    if (bs < 1) bs = 1;
    int w = (bs + 31) / 32 * 32;
    int q = D->thr_sm / w;
    if (q < m) m = q;
    int r = 65536 / (32 * w);
    if (r < m) m = r;
    if (sh) {
        size_t per = sh + (D->major >= 8 ? 1024 : 0);
        int z = (int)(D->smem_sm / per);
        if (z < m) m = z;
    }
    *n = m;
    return 0;
}
EXP cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int bs,
                                                              size_t sh) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, bs, sh, 0);
}
EXP cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int v,
                                                int d) {
    return 0;
}
EXP cudaError_t cudaLibraryLoadData(cudaLibrary_t *l, const void *c, enum cudaJitOption *jo,
                                    void **jv, unsigned nj, enum cudaLibraryOption *lo, void **lv,
                                    unsigned nl) {
    *l = (cudaLibrary_t)0x20;
    return 0;
}
EXP cudaError_t cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *n) {
    *k = (cudaKernel_t)0x30;
    return 0;
}
EXP cudaError_t cudaLibraryUnload(cudaLibrary_t l) { return 0; }

// ---------------- driver API
#define CU EXP CUresult
CU cuInit(unsigned f) {
    INIT;
    return 0;
}
CU cuDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
CU cuDeviceGetCount(int *n) {
    INIT;
    *n = n_dev;
    return 0;
}
CU cuDeviceGet(CUdevice *d, int i) {
    *d = i;
    return i < 0 || i >= n_dev ? CUDA_ERROR_INVALID_DEVICE : 0;
}
CU cuDeviceGetName(char *s, int n, CUdevice d) {
    INIT;
    snprintf(s, n, "%s", D->name);
    return 0;
}
CU cuDeviceTotalMem(size_t *b, CUdevice d) {
    INIT;
    *b = cap;
    return 0;
}
CU cuDeviceGetUuid(CUuuid *u, CUdevice d) {
    memcpy(u, "stubstubstubstub", 16);
    u->bytes[15] += d;
    return 0;
}
CU cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
    switch ((int)a) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *v = 1; return 0;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *v = 1; return 0;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: *v = 0; return 0;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *v = 0; return 0;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *v = 1; return 0;
    }
    return (CUresult)cudaDeviceGetAttribute(v, (enum cudaDeviceAttr)a, d);
}
CU cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *act) {
    *f = 0;
    *act = 1;
    return 0;
}
CU cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
    *c = (CUcontext)0x40;
    return 0;
}
CU cuDevicePrimaryCtxRelease(CUdevice d) { return 0; }
CU cuCtxGetCurrent(CUcontext *c) {
    *c = (CUcontext)0x40;
    return 0;
}
CU cuCtxSetCurrent(CUcontext c) { return 0; }
CU cuCtxGetDevice(CUdevice *d) {
    *d = cur_dev;
    return 0;
}
CU cuCtxPushCurrent(CUcontext c) { return 0; }
CU cuCtxPopCurrent(CUcontext *c) {
    *c = (CUcontext)0x40;
    return 0;
}
CU cuCtxSynchronize(void) { return 0; }
CU cuCtxGetLimit(size_t *v, CUlimit l) {
    *v = 0;
    return 0;
}
CU cuCtxSetLimit(CUlimit l, size_t v) { return 0; }
CU cuGetErrorString(CUresult e, const char **s) {
    *s = e == 2 ? "out of memory" : "stub driver error";
    return 0;
}
CU cuGetErrorName(CUresult e, const char **s) {
    *s = "CUDA_STUB";
    return 0;
}
CU cuMemGetInfo(size_t *f, size_t *t) { return (CUresult)cudaMemGetInfo(f, t); }
CU cuMemGetAddressRange(CUdeviceptr *b, size_t *n, CUdeviceptr p) {
    CUresult r = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mu);
    for (int i = 0; i < nr; i++)
        if (p >= rs[i].a && p < rs[i].a + rs[i].n) {
            if (b) *b = rs[i].a;
            if (n) *n = rs[i].n;
            r = 0;
            break;
        }
    pthread_mutex_unlock(&mu);
    return r;
}
typedef struct {
    size_t n;
    int rel, maps, dev;
    CUmemAllocationProp prop;
} H;
typedef struct {
    uintptr_t a;
    H *h;
    size_t n;
} Map;
static Map *mp;
static int nmp, cmp_;
CU cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p,
                                 CUmemAllocationGranularity_flags o) {
    *g = (size_t)2 << 20;
    return 0;
}
CU cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t al, CUdeviceptr ad, unsigned long long f) {
    INIT;
    pthread_mutex_lock(&mu);
    uintptr_t a = va_alloc(n, al ? al : (size_t)2 << 20, -1);
    pthread_mutex_unlock(&mu);
    TR("[stub] cuMemAddressReserve %zu -> %lx\n", n, (long)a);
    if (!a) return CUDA_ERROR_OUT_OF_MEMORY;
    *p = a;
    return 0;
}
CU cuMemAddressFree(CUdeviceptr p, size_t n) {
    pthread_mutex_lock(&mu);
    va_free(p);
    pthread_mutex_unlock(&mu);
    return 0;
}
CU cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p,
               unsigned long long f) {
    INIT;
    int dev = p && p->location.id >= 0 && p->location.id < n_dev ? p->location.id : cur_dev;
    pthread_mutex_lock(&mu);
    if (used[dev] + n + ctx_overhead > cap) {
        pthread_mutex_unlock(&mu);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    used[dev] += n;
    n_malloc++;
    pthread_mutex_unlock(&mu);
    H *x = calloc(1, sizeof *x);
    x->n = n;
    x->dev = dev;
    if (p) x->prop = *p;
    *h = (CUmemGenericAllocationHandle)(uintptr_t)x;
    TR("[stub] cuMemCreate %zu used=%zu\n", n, used[dev]);
    return 0;
}
static void hdrop(H *x) {
    if (x->rel && !x->maps) {
        used[x->dev] -= x->n;
        n_free++;
        free(x);
    }
}
CU cuMemRelease(CUmemGenericAllocationHandle h) {
    pthread_mutex_lock(&mu);
    H *x = (H *)(uintptr_t)h;
    x->rel = 1;
    hdrop(x);
    pthread_mutex_unlock(&mu);
    return 0;
}
CU cuMemMap(CUdeviceptr p, size_t n, size_t off, CUmemGenericAllocationHandle h,
            unsigned long long f) {
    pthread_mutex_lock(&mu);
    H *x = (H *)(uintptr_t)h;
    x->maps++;
    if (nmp == cmp_) {
        cmp_ = cmp_ ? cmp_ * 2 : 256;
        mp = realloc(mp, cmp_ * sizeof *mp);
    }
    mp[nmp++] = (Map){p, x, n};
    pthread_mutex_unlock(&mu);
    return 0;
}
CU cuMemUnmap(CUdeviceptr p, size_t n) {
    pthread_mutex_lock(&mu);
    for (int i = 0; i < nmp;)
        if (mp[i].a >= p && mp[i].a < p + n) {
            H *x = mp[i].h;
            mp[i] = mp[--nmp];
            x->maps--;
            hdrop(x);
        } else i++;
    pthread_mutex_unlock(&mu);
    return 0;
}
CU cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t c) { return 0; }
CU cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *h, void *p) {
    for (int i = 0; i < nmp; i++)
        if ((uintptr_t)p >= mp[i].a && (uintptr_t)p < mp[i].a + mp[i].n) {
            *h = (CUmemGenericAllocationHandle)(uintptr_t)mp[i].h;
            return 0;
        }
    return CUDA_ERROR_INVALID_VALUE;
}
CU cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *p, CUmemGenericAllocationHandle h) {
    *p = ((H *)(uintptr_t)h)->prop;
    return 0;
}
CU cuMemExportToShareableHandle(void *o, CUmemGenericAllocationHandle h,
                                CUmemAllocationHandleType t, unsigned long long f) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CU cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *h, void *o,
                                  CUmemAllocationHandleType t) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CU cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream s) { return 0; }
CU cuStreamWriteValue32(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned f) { return 0; }
CU cuModuleLoadData(CUmodule *m, const void *d) {
    *m = (CUmodule)0x50;
    return 0;
}
CU cuModuleLoadDataEx(CUmodule *m, const void *d, unsigned n, CUjit_option *o, void **v) {
    *m = (CUmodule)0x50;
    return 0;
}
CU cuModuleLoad(CUmodule *m, const char *f) {
    *m = (CUmodule)0x50;
    return 0;
}
CU cuModuleUnload(CUmodule m) { return 0; }
CU cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) {
    *f = (CUfunction)0x60;
    return 0;
}
CU cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
    INIT;
    *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
         : a == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
         : a == CU_FUNC_ATTRIBUTE_BINARY_VERSION      ? D->binver
                                                      : 0;
    return 0;
}
CU cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
CU cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
CU cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned sh, CUstream s, void **a, void **e) {
    n_launch++;
    return 0;
}
CU cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **a, void **e) {
    n_launch++;
    return 0;
}
CU cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
    *n = 1;
    return 0;
}
CU cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                             unsigned by, unsigned bz, unsigned sh, CUstream s, void **a) {
    return 0;
}
CU cuLinkCreate(unsigned n, CUjit_option *o, void **v, CUlinkState *s) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CU cuLinkAddData(CUlinkState s, CUjitInputType t, void *d, size_t n, const char *nm, unsigned no,
                 CUjit_option *o, void **v) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CU cuLinkComplete(CUlinkState s, void **c, size_t *n) { return CUDA_ERROR_NOT_SUPPORTED; }
CU cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int bs, size_t sh) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, bs, sh);
}
CU cuPointerGetAttribute(void *d, CUpointer_attribute a, CUdeviceptr p) {
    if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)d = is_dev((void *)p) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)d = 0;
    else *(void **)d = 0;
    return 0;
}
CU cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t r, void *a,
                          const cuuint64_t *gd, const cuuint64_t *gs, const cuuint32_t *bd,
                          const cuuint32_t *es, CUtensorMapInterleave i, CUtensorMapSwizzle s,
                          CUtensorMapL2promotion l, CUtensorMapFloatOOBfill o) {
    memset(m, 0, sizeof *m);
    return 0;
}
static CUresult notsup(void) { return CUDA_ERROR_NOT_SUPPORTED; }
static void *self;
static void *look(const char *s) {
    if (!self) {
        Dl_info i;
        dladdr((void *)look, &i);
        self = dlopen(i.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    }
    char b[256];
    for (int v = 4; v >= 2; v--) {
        snprintf(b, sizeof b, "%s_v%d", s, v);
        void *p = dlsym(self, b);
        if (p) return p;
    }
    return dlsym(self, s);
}
static cudaError_t gep(const char *s, void **f, enum cudaDriverEntryPointQueryResult *q) {
    INIT;
    void *p = look(s);
    TR("[stub] entry point %s -> %p\n", s, p);
    *f = p;
    if (q) *q = p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return 0;
}
EXP cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v,
                                                 unsigned long long fl,
                                                 enum cudaDriverEntryPointQueryResult *q) {
    return gep(s, f, q);
}
EXP cudaError_t cudaGetDriverEntryPoint(const char *s, void **f, unsigned long long fl,
                                        enum cudaDriverEntryPointQueryResult *q) {
    return gep(s, f, q);
}
CU cuGetProcAddress(const char *s, void **f, int v, cuuint64_t fl,
                    CUdriverProcAddressQueryResult *q) {
    void *p = look(s);
    *f = p;
    if (q) *q = p ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return 0;
}

// ---------------- NVML
typedef int nv;
EXP nv nvmlInit_v2(void) {
    INIT;
    return 0;
}
EXP nv nvmlInit(void) {
    INIT;
    return 0;
}
EXP nv nvmlInitWithFlags(unsigned f) {
    INIT;
    return 0;
}
EXP nv nvmlShutdown(void) { return 0; }
EXP const char *nvmlErrorString(nv r) { return "stub"; }
EXP nv nvmlDeviceGetCount_v2(unsigned *n) {
    INIT;
    *n = n_dev;
    return 0;
}
EXP nv nvmlDeviceGetCount(unsigned *n) {
    INIT;
    *n = n_dev;
    return 0;
}
EXP nv nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
    *h = (void *)(uintptr_t)(0x70 + i);
    return 0;
}
EXP nv nvmlDeviceGetHandleByPciBusId_v2(const char *s, void **h) {
    *h = (void *)0x70;
    return 0;
}
EXP nv nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
    snprintf(s, n, "GPU-73747562-7374-7562-7374-7562737475%02x",
             0x62 + (int)((uintptr_t)h - 0x70));
    return 0;
}
EXP nv nvmlDeviceGetName(void *h, char *s, unsigned n) {
    INIT;
    snprintf(s, n, "%s", D->name);
    return 0;
}
EXP nv nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *i) {
    *n = 0;
    return 0;
}
EXP nv nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, void *i) {
    *n = 0;
    return 0;
}
EXP nv nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned l, void *t) { return 3; }
EXP nv nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned l, void *p) { return 3; }
EXP nv nvmlSystemGetCudaDriverVersion_v2(int *v) {
    *v = 13000;
    return 0;
}
EXP nv nvmlSystemGetDriverVersion(char *s, unsigned n) {
    snprintf(s, n, "580.65.06");
    return 0;
}
EXP nv nvmlDeviceGetGpuFabricInfoV(void *h, void *i) { return 3; }
EXP nv nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) {
    INIT;
    m[0] = cap;
    m[2] = used[(uintptr_t)h - 0x70] + ctx_overhead;
    m[1] = cap - m[2];
    return 0;
}
EXP size_t stub_device_used(void) { return used[cur_dev]; }
EXP size_t stub_launches(void) { return n_launch; }
EXP void stub_mark(const char *s) {
    INIT;
    if (trace || klog) { fprintf(tf, "[mark] %s\n", s); }
}
