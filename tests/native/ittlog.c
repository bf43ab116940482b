/* An ITT collector that logs tasks, marks and names as JSON lines to the file named by ITTLOG.
 *
 *   INTEL_LIBITTNOTIFY64=$PWD/ittlog.so INTEL_ITTNOTIFY_GROUPS=all ITTLOG=out.jsonl python app.py
 *
 * A library that exports __itt_api_version but no __itt_api_init has its functions looked up by name, so the
 * structures below are all of the interface that is needed. The collector is loaded at the first call of a program,
 * so the first domain or string of each ITT copy in the process is made without it and has no line of its own. */
#include "jsonlog.h"

typedef struct { unsigned long long d1, d2, d3; } Id;
typedef struct { volatile int flags; const char *name; void *wide; int extra1; void *extra2, *next; } Domain;
typedef struct { const char *text; void *wide; int extra1; void *extra2, *next; } String;

__attribute__((constructor)) static void open_log(void) { log_open("ITTLOG"); }

static void begin(const char *op, const Domain *domain) {
    log_begin(op);
    log_text("domain", domain ? domain->name : NULL);
}

static void log_id(const char *key, Id id) {
    if (id.d1 || id.d2) fprintf(log_file, ", \"%s\": [%llu, %llu]", key, id.d1, id.d2);
}

static void task(const char *op, const Domain *domain, Id id, Id parent, const String *name) {
    begin(op, domain);
    log_id("id", id);
    log_id("parent", parent);
    if (name) log_text("message", name->text);
    log_end();
}

static const Id none;

EXPORT const char *__itt_api_version(void) { return "ittlog"; }

EXPORT Domain *__itt_domain_create(const char *name) {
    Domain *domain = calloc(1, sizeof *domain);
    domain->flags = 1; /* enabled */
    domain->name = strdup(name);
    task("domain", domain, none, none, NULL);
    return domain;
}

EXPORT String *__itt_string_handle_create(const char *text) {
    String *string = calloc(1, sizeof *string);
    string->text = strdup(text);
    task("string", NULL, none, none, string);
    return string;
}

EXPORT void __itt_task_begin(const Domain *domain, Id id, Id parent, String *name) {
    task("task_begin", domain, id, parent, name);
}
EXPORT void __itt_task_end(const Domain *domain) { task("task_end", domain, none, none, NULL); }
EXPORT void __itt_task_begin_overlapped(const Domain *domain, Id id, Id parent, String *name) {
    task("overlapped_begin", domain, id, parent, name);
}
EXPORT void __itt_task_end_overlapped(const Domain *domain, Id id) {
    task("overlapped_end", domain, id, none, NULL);
}
EXPORT void __itt_id_create(const Domain *domain, Id id) { task("id", domain, id, none, NULL); }
EXPORT void __itt_id_destroy(const Domain *domain, Id id) { task("id_destroy", domain, id, none, NULL); }

EXPORT void __itt_marker(const Domain *domain, Id id, String *name, int scope) {
    begin("marker", domain);
    log_id("id", id);
    log_text("message", name->text);
    log_integer("scope", scope);
    log_end();
}

/* Types: 1 uint64, 2 int64, 3 uint32, 4 int32, 5 uint16, 6 int16, 7 float, 8 double. */
EXPORT void __itt_metadata_add(const Domain *domain, Id id, String *key, int type, size_t count, void *data) {
    begin("metadata", domain);
    log_id("id", id);
    log_text("key", key->text);
    log_integer("type", type);
    log_unsigned("count", count);
    if (type == 1 && count) log_unsigned("value", *(uint64_t *)data);
    if (type == 2 && count) log_integer("value", *(int64_t *)data);
    if (type == 8 && count) log_real("value", *(double *)data);
    log_end();
}

EXPORT void __itt_metadata_str_add(const Domain *domain, Id id, String *key, const char *data, size_t length) {
    (void)length;
    begin("metadata", domain);
    log_id("id", id);
    log_text("key", key->text);
    log_text("value", data);
    log_end();
}

EXPORT void __itt_thread_set_name(const char *name) {
    begin("thread", NULL);
    log_text("message", name);
    log_end();
}

EXPORT int __itt_event_create(const char *name, int length) {
    static int last;
    int id = __sync_add_and_fetch(&last, 1);
    (void)length;
    begin("event", NULL);
    log_integer("event", id);
    log_text("message", name);
    log_end();
    return id;
}

static void signal_of(const char *op, const char *key, long long value) {
    begin(op, NULL);
    if (key) log_integer(key, value);
    log_end();
}

EXPORT int __itt_event_start(int event) { signal_of("event_start", "event", event); return 0; }
EXPORT int __itt_event_end(int event) { signal_of("event_end", "event", event); return 0; }
EXPORT void __itt_pause(void) { signal_of("pause", NULL, 0); }
EXPORT void __itt_resume(void) { signal_of("resume", NULL, 0); }
EXPORT void __itt_detach(void) { signal_of("detach", NULL, 0); }
