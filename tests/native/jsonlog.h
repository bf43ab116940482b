/* Writes one JSON object a line to the file that an environment variable names.
 *
 * Each line is flushed as it ends, so a killed process loses nothing, and the file is opened for appending, so
 * that forked and started children share it. A line is written under a mutex, which a fork must not leave locked. */
#ifndef JSONLOG_H
#define JSONLOG_H

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static FILE *log_file;
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;

static void log_lock(void) { pthread_mutex_lock(&log_mutex); }
static void log_unlock(void) { pthread_mutex_unlock(&log_mutex); }

/* Call it with the mutex held, or before there are threads. */
static void log_open(const char *variable) {
    if (log_file) return;
    const char *path = getenv(variable);
    log_file = path ? fopen(path, "ae") : NULL;
    if (!log_file) log_file = stderr;
    setvbuf(log_file, NULL, _IOFBF, 1 << 16);
    pthread_atfork(log_lock, log_unlock, log_unlock);
}

static void log_quoted(const char *text) {
    fputc('"', log_file);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') fprintf(log_file, "\\%c", *c);
        else if (*c < 0x20 || *c == 0x7f) fprintf(log_file, "\\u%04x", *c);
        else fputc(*c, log_file);
    }
    fputc('"', log_file);
}

static void log_text(const char *key, const char *value) {
    fprintf(log_file, ", \"%s\": ", key);
    if (value) log_quoted(value);
    else fputs("null", log_file);
}

static void log_integer(const char *key, long long value) { fprintf(log_file, ", \"%s\": %lld", key, value); }

static void log_unsigned(const char *key, unsigned long long value) {
    fprintf(log_file, ", \"%s\": %llu", key, value);
}

static inline void log_real(const char *key, double value) {
    fprintf(log_file, ", \"%s\": ", key);
    if (isfinite(value)) fprintf(log_file, "%.17g", value);
    else fputs(isnan(value) ? "NaN" : value < 0 ? "-Infinity" : "Infinity", log_file);
}

/* Opens a line, with the mutex held until log_end: the order of the lines is the order of their times. */
static void log_begin(const char *op) {
    struct timespec now;
    log_lock();
    clock_gettime(CLOCK_MONOTONIC, &now);
    fprintf(log_file, "{\"op\": \"%s\"", op);
    log_integer("t", (long long)now.tv_sec * 1000000000 + now.tv_nsec);
    log_integer("pid", getpid());
    log_integer("tid", syscall(SYS_gettid));
}

static void log_end(void) {
    fputs("}\n", log_file);
    fflush(log_file);
    log_unlock();
}

#endif
