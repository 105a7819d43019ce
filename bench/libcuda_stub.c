// A libcuda.so.1 without a GPU: enough of the driver's interface for Triton to load kernels and launch them into nothing.
#include <stddef.h>
#include <string.h>

typedef int CUresult;

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
CUresult cuDeviceGet(int *device, int index) { *device = index; return 0; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 232448; return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
CUresult cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
CUresult cuCtxSetCurrent(void *context) { return 0; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return 0; }
CUresult cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(int limit, size_t value) { return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "an error of the stub"; return 0; }
CUresult cuModuleLoadData(void **module, const void *image) {
  static size_t loaded = 0;
  *module = (void *)++loaded;
  return 0;
}
CUresult cuModuleUnload(void *module) { return 0; }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
CUresult cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(void *function, int config) { return 0; }
CUresult cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) { *count = 1; return 0; }
CUresult cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
  memcpy(data, &pointer, sizeof pointer);
  return 0;
}
CUresult cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
CUresult cuTensorMapEncodeTiled(void) { return 0; }
CUresult cuTensorMapEncodeIm2col(void) { return 0; }
CUresult cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) { return 0; }
