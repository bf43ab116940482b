/* Preloaded, it takes the place of the CUDA runtime's cudaProfilerStart and cudaProfilerStop: each call is a JSON line
 * in the file named by NVTXLOG, among those of nvtxlog, and succeeds. */
#include "jsonlog.h"

__attribute__((constructor)) static void open_log(void) { log_open("NVTXLOG"); }

static int called(const char *function) {
    log_begin("call");
    log_text("function", function);
    log_unsigned("returned", 0);
    log_end();
    return 0; /* cudaSuccess */
}

EXPORT int cudaProfilerStart(void) { return called("cudaProfilerStart"); }
EXPORT int cudaProfilerStop(void) { return called("cudaProfilerStop"); }
