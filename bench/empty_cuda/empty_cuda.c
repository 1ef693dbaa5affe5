// CUDA's runtime without a GPU, for rehearsals: memory is the host's, copies copy, kernels do nothing, events take the
// host's time. torch and FBGEMM built for CUDA load it in place of libcudart.so (run.sh). So all of their code that runs
// on the host does run: checks of arguments, placement, sizes of memory, shapes of launches. Results are zeros.
//
// EMPTY_CUDA_LOG: file that gets a line for each launch: name of the kernel, grid, block, bytes of shared memory.
// EMPTY_CUDA_NAMES: file that gets the names of all kernels, as libraries register them.
//
// Covered: what torch 2.11 and FBGEMM 1.6 import from libcudart.so.13 (nm -D), and what they ask of the driver and NVML.
// Not covered: CUPTI, and most of cuBLAS and NCCL (libraries.c), which have a runtime of their own inside.
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define OK return cudaSuccess
static double now_ms(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }
static cudaError_t take(void **p, size_t n) { *p = calloc(1, n ? n : 1); return *p ? cudaSuccess : cudaErrorMemoryAllocation; }
// --- device
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; OK; }
cudaError_t cudaGetDevice(int *d) { *d = 0; OK; }
cudaError_t cudaSetDevice(int d) { OK; }
cudaError_t cudaDeviceSynchronize(void) { OK; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; OK; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; OK; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->totalGlobalMem = (size_t)4 << 30; p->major = 9; p->minor = 0; p->multiProcessorCount = 132; p->l2CacheSize = 50 << 20;
  p->warpSize = 32; p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10; p->sharedMemPerMultiprocessor = 228 << 10; p->regsPerBlock = 65536;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64; p->managedMemory = p->concurrentManagedAccess = 1;
  p->unifiedAddressing = 1; p->regsPerMultiprocessor = 65536; p->maxBlocksPerMultiProcessor = 32;
  OK;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  switch ((int)a) {
  case cudaDevAttrMultiProcessorCount: *v = 132; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 227 << 10; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *v = 48 << 10; break;
  case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
  case cudaDevAttrMaxGridDimY: *v = 65535; break;
  case cudaDevAttrComputeCapabilityMajor: *v = 9; break;
  case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
  case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
  case cudaDevAttrWarpSize: *v = 32; break;
  default: *v = 1;
  }
  OK;
}
cudaError_t cudaDeviceCanAccessPeer(int *v, int a, int b) { *v = 0; OK; }
cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned b) { OK; }
cudaError_t cudaDeviceGetByPCIBusId(int *d, const char *s) { *d = 0; OK; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:00:00.0"); OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; OK; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) { *p = (cudaMemPool_t)1; OK; }
// --- errors
const char *cudaGetErrorName(cudaError_t e) { return "cudaError"; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : "an error of the empty runtime"; }
cudaError_t cudaGetLastError(void) { OK; }
cudaError_t cudaPeekAtLastError(void) { OK; }
// --- memory
cudaError_t cudaMalloc(void **p, size_t n) { return take(p, n); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return take(p, n); }
cudaError_t cudaMallocManaged(void **p, size_t n, unsigned f) { return take(p, n); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { return take(p, n); }
cudaError_t cudaFree(void *p) { free(p); OK; }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { free(p); OK; }
cudaError_t cudaFreeHost(void *p) { free(p); OK; }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) { OK; }
cudaError_t cudaHostUnregister(void *p) { OK; }
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned f) { *d = h; OK; }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *f = *t = (size_t)4 << 30; OK; }
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { memmove(d, s, n); OK; }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) { memmove(d, s, n); OK; }
cudaError_t cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, cudaStream_t t) { memmove(d, s, n); OK; }
cudaError_t cudaMemcpyToSymbol(const void *y, const void *s, size_t n, size_t o, enum cudaMemcpyKind k) { OK; }
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t t) {
  for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (const char *)s + i * sp, w);
  OK;
}
cudaError_t cudaMemset(void *p, int v, size_t n) { memset(p, v, n); OK; }
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { memset(p, v, n); OK; }
cudaError_t cudaMemAdvise(const void *p, size_t n, enum cudaMemoryAdvise a, struct cudaMemLocation l) { OK; }
cudaError_t cudaMemPrefetchAsync(const void *p, size_t n, struct cudaMemLocation l, unsigned f, cudaStream_t s) { OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { *(uint64_t *)v = 0; OK; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { OK; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *d, size_t n) { OK; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a); a->type = cudaMemoryTypeDevice; a->devicePointer = a->hostPointer = (void *)p; OK;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *s) { static char room[1 << 16]; *p = room; OK; }
// --- streams and events
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = malloc(8); OK; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = malloc(8); OK; }
cudaError_t cudaStreamDestroy(cudaStream_t s) { free(s); OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; OK; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
    const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  *c = cudaStreamCaptureStatusNone; if (id) *id = 0; OK;
}
cudaError_t cudaStreamQuery(cudaStream_t s) { OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { OK; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t c, void *u, unsigned f) { c(s, cudaSuccess, u); OK; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) { f(u); OK; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { OK; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = calloc(1, sizeof(double)); OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); OK; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { *(double *)e = now_ms(); OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { OK; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { OK; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = *(double *)b - *(double *)a; OK; }
// --- kernels
typedef struct { dim3 g, b; size_t n; void *s; } Call;
static __thread Call call;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, void *s) { call = (Call){g, b, n, s}; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *n, void *s) { *g = call.g; *b = call.b; *n = call.n; *(void **)s = call.s; OK; }
static struct { const void *f; const char *name; } *names;
static size_t n_names, room;
static FILE *kernels;
static FILE *opened(const char *variable) { return getenv(variable) ? fopen(getenv(variable), "a") : NULL; }
void **__cudaRegisterFatBinary(void *f) { static void *h; return &h; }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
char __cudaInitModule(void **h) { return 0; }
void __cudaRegisterVar(void **h, char *a, char *b, const char *c, int d, size_t e, int f, int g) {}
void __cudaRegisterFunction(void **h, const char *f, char *d, const char *name, int l, void *a, void *b, void *c, void *e, int *w) {
  if (!kernels) kernels = opened("EMPTY_CUDA_NAMES");
  if (kernels) fprintf(kernels, "%s\n", name), fflush(kernels);
  if (n_names == room) names = realloc(names, (room = room ? 2 * room : 4096) * sizeof *names);
  names[n_names].f = f; names[n_names++].name = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; OK; }
// Writes a launch to the log, by the name that its kernel was registered with.
static void note(const void *f, dim3 g, dim3 b, size_t n) {
  static FILE *log;
  if (!log && !(log = opened("EMPTY_CUDA_LOG"))) return;
  for (size_t i = 0; i < n_names; i++)
    if (names[i].f == f) {
      fprintf(log, "%s %u,%u,%u %u,%u,%u %zu\n", names[i].name, g.x, g.y, g.z, b.x, b.y, b.z, n);
      fflush(log);
      return;
    }
}
// A launch that no GPU takes ends as CUDA's does.
static cudaError_t launch(const void *f, dim3 g, dim3 b, size_t n) {
  note(f, g, b, n);
  if (!g.x || !g.y || !g.z || g.x > 2147483647u || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
  if (!b.x || b.x * b.y * b.z > 1024 || b.z > 64) return cudaErrorInvalidConfiguration;
  if (n > 227 << 10) return cudaErrorInvalidValue;
  OK;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launch(f, g, b, n); }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launch((const void *)k, g, b, n); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = 90; a->maxDynamicSharedSizeBytes = 48 << 10; OK;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) { *n = 2; OK; }
// --- the driver's functions that torch asks for
static int active(int d, unsigned *f, int *a) { if (f) *f = 0; *a = 1; return 0; }
static int none(void) { return 801; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long l, enum cudaDriverEntryPointQueryResult *r) {
  *f = !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)active : (void *)none; if (r) *r = cudaDriverEntryPointSuccess; OK;
}
// --- the driver (libcuda.so.1), NVML (libnvidia-ml.so.1), and what is refused
int cuInit(unsigned f) { return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { return active(d, f, a); }
int nvmlDeviceGetCount_v2(void) { return 1; }
int nvmlDeviceGetHandleByIndex_v2(void) { return 1; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 1; }
int nvmlDeviceGetNvLinkState(void) { return 1; }
int nvmlDeviceGetPciInfo_v3(void) { return 1; }
int nvmlInit_v2(void) { return 1; }
