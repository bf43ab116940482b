/* A stand-in for libroctx64 that logs each call as a JSON line to the file named by ROCTXLOG.
 *
 * Each line says which library was called, by the name it was built with (-DLIBRARY_NAME="\"...\"").
 * With -DNO_PROFILER it cannot pause and resume. */
#include "jsonlog.h"

#ifndef LIBRARY_NAME
#define LIBRARY_NAME "libroctx64.so.4"
#endif

static unsigned long long last_id;
static __thread int depth;

__attribute__((constructor)) static void open_log(void) { log_open("ROCTXLOG"); }

static void begin(const char *op) {
    log_begin(op);
    log_text("library", LIBRARY_NAME);
}

EXPORT void roctxMarkA(const char *message) {
    begin("mark");
    log_text("message", message);
    log_end();
}

EXPORT int roctxRangePushA(const char *message) {
    begin("push");
    log_integer("depth", depth);
    log_text("message", message);
    log_end();
    return depth++;
}

EXPORT int roctxRangePop(void) {
    if (depth >= 0) depth--;
    begin("pop");
    log_integer("depth", depth);
    log_end();
    if (depth >= 0) return depth;
    depth = 0;
    return -1;
}

EXPORT uint64_t roctxRangeStartA(const char *message) {
    unsigned long long id = __sync_add_and_fetch(&last_id, 1);
    begin("start");
    log_unsigned("id", id);
    log_text("message", message);
    log_end();
    return id;
}

EXPORT void roctxRangeStop(uint64_t id) {
    begin("end");
    log_unsigned("id", id);
    log_end();
}

#ifndef NO_PROFILER /* roctracer's library has no such functions */
static int profiler(const char *op, uint64_t thread) {
    begin(op);
    log_unsigned("thread", thread);
    log_end();
    return 0;
}

EXPORT int roctxProfilerPause(uint64_t thread) { return profiler("pause", thread); }
EXPORT int roctxProfilerResume(uint64_t thread) { return profiler("resume", thread); }
#endif
