// cuBLAS and NCCL without a GPU: what a training step with dense layers calls of them. Products are not made.
// Collectives are those of one rank, which receives what it sends.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NOTHING(name) int name() { return 0; }
static int handle(void **h) { *h = malloc(8); return 0; }

int cublasCreate_v2(void **h) { return handle(h); }
int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulDescCreate(void **d, int c, int t) { return handle(d); }
int cublasLtMatrixLayoutCreate(void **l, int t, uint64_t r, uint64_t c, int64_t ld) { return handle(l); }
int cublasLtMatmulPreferenceCreate(void **p) { return handle(p); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, void *r, int *found) {
  *found = 1;
  return 0;
}
NOTHING(cublasDestroy_v2) NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2) NOTHING(cublasSgemm_v2) NOTHING(cublasGemmEx) NOTHING(cublasSgemmStridedBatched)
NOTHING(cublasSgemv_v2) NOTHING(cublasSdot_v2) NOTHING(cublasLtMatmul) NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatrixLayoutDestroy) NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy) NOTHING(cublasLtMatmulPreferenceSetAttribute)

int ncclGetUniqueId(void *id) { memset(id, 1, 128); return 0; }
int ncclGetVersion(int *v) { *v = 22809; return 0; }
int ncclCommInitRank(void **c, int n, ...) { return handle(c); }
int ncclCommInitRankConfig(void **c, int n, ...) { return handle(c); }
int ncclCommSplit(void *c, int color, int key, void **made, void *config) { return handle(made); }
int ncclCommGetAsyncError(void *c, int *e) { *e = 0; return 0; }
const char *ncclGetErrorString(int e) { return "an error of the empty NCCL"; }
const char *ncclGetLastError(void *c) { return ""; }
static size_t bytes(size_t n, int type) { return n * (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }
static int copied(void *to, const void *from, size_t n, int type) {
  if (to != from) memmove(to, from, bytes(n, type));
  return 0;
}
int ncclAllGather(const void *s, void *r, size_t n, int type, void *c, void *st) { return copied(r, s, n, type); }
int ncclAlltoAll(const void *s, void *r, size_t n, int type, void *c, void *st) { return copied(r, s, n, type); }
int ncclAllReduce(const void *s, void *r, size_t n, int type, int op, void *c, void *st) { return copied(r, s, n, type); }
int ncclReduceScatter(const void *s, void *r, size_t n, int type, int op, void *c, void *st) { return copied(r, s, n, type); }
int ncclReduce(const void *s, void *r, size_t n, int type, int op, int root, void *c, void *st) { return copied(r, s, n, type); }
int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, void *c, void *st) { return copied(r, s, n, type); }
// Of a group's sends and receives, the n-th send goes to the n-th receive, whichever comes first.
enum { MOST = 4096 };
static struct { const void *from; void *to; size_t n; int type; } message[MOST];
static int sends, receives;
static int met(int i) { return message[i].from && message[i].to ? copied(message[i].to, message[i].from, message[i].n, message[i].type) : 0; }
int ncclSend(const void *s, size_t n, int type, int to, void *c, void *st) {
  message[sends].from = s, message[sends].n = n, message[sends].type = type;
  return met(sends++);
}
int ncclRecv(void *r, size_t n, int type, int from, void *c, void *st) {
  message[receives].to = r;
  return met(receives++);
}
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) {
  if (sends == receives) memset(message, 0, sizeof message), sends = receives = 0;
  return 0;
}
NOTHING(ncclCommAbort) NOTHING(ncclCommDestroy) NOTHING(ncclCommFinalize) NOTHING(ncclCommRegister)
NOTHING(ncclCommDeregister)
