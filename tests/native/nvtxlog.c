/* An NVTX v3 injection library that logs every annotation as a JSON line to the file named by NVTXLOG.
 *
 *   cc -shared -fPIC -I.../nvidia/cu13/include nvtxlog.c -o nvtxlog.so -lpthread
 *   NVTX_INJECTION64_PATH=$PWD/nvtxlog.so NVTXLOG=out.jsonl python app.py
 *
 * NVTXLOG_MODE chooses how the payload extension answers "is this domain enabled?", where tools differ:
 *   enabled     yes (the default)
 *   disabled    no, the tool filters the domain out
 *   no-slot     the extension is there but leaves the question unanswered, which the headers take for yes
 *   init-fails  the extension refuses to start, which the headers take for no: Nsight Systems up to 2024.2
 * Built with -DNO_EXTENSION there is no extension at all, as in tools that know NVTX v3 alone (a yes).
 *
 * Wide-character functions, resources and the CUDA, OpenCL and sync modules are not logged. */
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

#include "jsonlog.h"

typedef struct Category {
    uint32_t id;
    char *name;
    struct Category *next;
} Category;

typedef struct Domain {
    char *name;
    unsigned index;
    Category *categories;
    struct Domain *next;
} Domain;

#define MAX_DOMAINS 256 /* those beyond share the last one's depth */

static Domain default_domain;
static Domain *domains = &default_domain;
static unsigned long long last_id;
static __thread int depths[MAX_DOMAINS];

static Domain *domain_of(nvtxDomainHandle_t handle) { return handle ? (Domain *)handle : &default_domain; }

static int *depth_of(nvtxDomainHandle_t handle) {
    unsigned index = domain_of(handle)->index;
    return &depths[index < MAX_DOMAINS ? index : MAX_DOMAINS - 1];
}

static unsigned long long new_id(void) { return __sync_add_and_fetch(&last_id, 1); }

static const char *category_name(const Domain *domain, uint32_t id) {
    for (Category *category = domain->categories; category; category = category->next)
        if (category->id == id) return category->name;
    return NULL;
}

static void log_payload(const nvtxEventAttributes_t *event) {
    switch ((int)event->payloadType) {
    case NVTX_PAYLOAD_UNKNOWN: break;
    case NVTX_PAYLOAD_TYPE_UNSIGNED_INT64: log_unsigned("payload", event->payload.ullValue); break;
    case NVTX_PAYLOAD_TYPE_INT64: log_integer("payload", event->payload.llValue); break;
    case NVTX_PAYLOAD_TYPE_DOUBLE: log_real("payload", event->payload.dValue); break;
    case NVTX_PAYLOAD_TYPE_UNSIGNED_INT32: log_unsigned("payload", event->payload.uiValue); break;
    case NVTX_PAYLOAD_TYPE_INT32: log_integer("payload", event->payload.iValue); break;
    case NVTX_PAYLOAD_TYPE_FLOAT: log_real("payload", event->payload.fValue); break;
    case NVTX_PAYLOAD_TYPE_EXT: {
        const nvtxPayloadData_t *data = (const nvtxPayloadData_t *)(uintptr_t)event->payload.ullValue;
        const unsigned char *bytes = data->payload;
        log_unsigned("payload_schema", data->schemaId);
        fputs(", \"payload_hex\": \"", log_file);
        for (size_t i = 0; i < data->size; i++) fprintf(log_file, "%02x", bytes[i]);
        fputc('"', log_file);
        break;
    }
    default: log_integer("payload_type", event->payloadType);
    }
}

static void log_attributes(const Domain *domain, const nvtxEventAttributes_t *event) {
    int registered = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
    if (registered) log_text("message", (const char *)event->message.registered);
    else if (event->messageType == NVTX_MESSAGE_TYPE_ASCII) log_text("message", event->message.ascii);
    fprintf(log_file, ", \"registered\": %s", registered ? "true" : "false");
    if (event->colorType == NVTX_COLOR_ARGB) log_unsigned("color", event->color);
    if (event->category) {
        log_unsigned("category", event->category);
        log_text("category_name", category_name(domain, event->category));
    }
    log_payload(event);
}

static void begin(const char *op, nvtxDomainHandle_t domain) {
    log_begin(op);
    log_text("domain", domain_of(domain)->name);
}

static nvtxEventAttributes_t plain(const char *message) {
    nvtxEventAttributes_t event = {0};
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = message ? message : "";
    return event;
}

/* Push and pop: a stack for each thread and domain. The depth of the outermost range is 0, a pop too many has -1. */

static int domain_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    int depth = (*depth_of(domain))++;
    begin("push", domain);
    log_integer("depth", depth);
    log_attributes(domain_of(domain), event);
    log_end();
    return depth;
}

static int domain_pop(nvtxDomainHandle_t domain) {
    int depth = *depth_of(domain) - 1;
    if (depth >= 0) *depth_of(domain) = depth;
    begin("pop", domain);
    log_integer("depth", depth);
    log_end();
    return depth;
}

static int push_event(const nvtxEventAttributes_t *event) { return domain_push(NULL, event); }
static int push_text(const char *message) {
    nvtxEventAttributes_t event = plain(message);
    return domain_push(NULL, &event);
}
static int pop(void) { return domain_pop(NULL); }

/* Start and end: ranges that may cross and may end on another thread. */

static nvtxRangeId_t domain_start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    unsigned long long id = new_id();
    begin("start", domain);
    log_unsigned("id", id);
    log_attributes(domain_of(domain), event);
    log_end();
    return id;
}

static void domain_finish(nvtxDomainHandle_t domain, nvtxRangeId_t id) {
    begin("end", domain);
    log_unsigned("id", id);
    log_end();
}

static nvtxRangeId_t start_event(const nvtxEventAttributes_t *event) { return domain_start(NULL, event); }
static nvtxRangeId_t start_text(const char *message) {
    nvtxEventAttributes_t event = plain(message);
    return domain_start(NULL, &event);
}
static void finish(nvtxRangeId_t id) { domain_finish(NULL, id); }

static void domain_mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    begin("mark", domain);
    log_attributes(domain_of(domain), event);
    log_end();
}

static void mark_event(const nvtxEventAttributes_t *event) { domain_mark(NULL, event); }
static void mark_text(const char *message) {
    nvtxEventAttributes_t event = plain(message);
    domain_mark(NULL, &event);
}

/* Names. They are kept for the life of the process, so a handle stays good after its domain is destroyed. */

static nvtxDomainHandle_t domain_create(const char *name) {
    Domain *domain;
    log_lock();
    for (domain = domains; domain; domain = domain->next)
        if (domain->name && !strcmp(domain->name, name)) break;
    if (!domain && (domain = calloc(1, sizeof *domain))) {
        domain->name = strdup(name);
        domain->index = domains->index + 1;
        domain->next = domains;
        domains = domain;
    }
    log_unlock();
    begin("domain", (nvtxDomainHandle_t)domain);
    log_end();
    return (nvtxDomainHandle_t)domain;
}

static void domain_destroy(nvtxDomainHandle_t domain) {
    begin("domain_destroy", domain);
    log_end();
}

static nvtxStringHandle_t domain_register(nvtxDomainHandle_t domain, const char *text) {
    begin("register", domain);
    log_text("message", text);
    log_end();
    return (nvtxStringHandle_t)strdup(text ? text : "");
}

static void domain_category(nvtxDomainHandle_t handle, uint32_t id, const char *name) {
    Category *category = calloc(1, sizeof *category);
    begin("category", handle);
    log_unsigned("category", id);
    log_text("category_name", name);
    if (category) {
        *category = (Category){id, strdup(name), domain_of(handle)->categories};
        domain_of(handle)->categories = category;
    }
    log_end();
}

static void category(uint32_t id, const char *name) { domain_category(NULL, id, name); }

static void thread_name(uint32_t thread, const char *name) {
    begin("thread", NULL);
    log_unsigned("thread", thread);
    log_text("message", name);
    log_end();
}

static void open_log(void) {
    log_lock();
    log_open("NVTXLOG");
    log_unlock();
}

#define PUT(table, size, index, function) \
    do { \
        if ((unsigned)(index) < (size) && (table)[index]) *(table)[index] = (NvtxFunctionPointer)(function); \
    } while (0)

EXPORT int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size;
    open_log();
    if (!callbacks || callbacks->struct_size < sizeof *callbacks) return 0;
    if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) {
        PUT(table, size, NVTX_CBID_CORE_MarkEx, mark_event);
        PUT(table, size, NVTX_CBID_CORE_MarkA, mark_text);
        PUT(table, size, NVTX_CBID_CORE_RangeStartEx, start_event);
        PUT(table, size, NVTX_CBID_CORE_RangeStartA, start_text);
        PUT(table, size, NVTX_CBID_CORE_RangeEnd, finish);
        PUT(table, size, NVTX_CBID_CORE_RangePushEx, push_event);
        PUT(table, size, NVTX_CBID_CORE_RangePushA, push_text);
        PUT(table, size, NVTX_CBID_CORE_RangePop, pop);
        PUT(table, size, NVTX_CBID_CORE_NameCategoryA, category);
        PUT(table, size, NVTX_CBID_CORE_NameOsThreadA, thread_name);
    }
    if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) {
        PUT(table, size, NVTX_CBID_CORE2_DomainMarkEx, domain_mark);
        PUT(table, size, NVTX_CBID_CORE2_DomainRangeStartEx, domain_start);
        PUT(table, size, NVTX_CBID_CORE2_DomainRangeEnd, domain_finish);
        PUT(table, size, NVTX_CBID_CORE2_DomainRangePushEx, domain_push);
        PUT(table, size, NVTX_CBID_CORE2_DomainRangePop, domain_pop);
        PUT(table, size, NVTX_CBID_CORE2_DomainNameCategoryA, domain_category);
        PUT(table, size, NVTX_CBID_CORE2_DomainRegisterStringA, domain_register);
        PUT(table, size, NVTX_CBID_CORE2_DomainCreateA, domain_create);
        PUT(table, size, NVTX_CBID_CORE2_DomainDestroy, domain_destroy);
    }
    return 1;
}

#ifndef NO_EXTENSION
static int mode_is(const char *name) {
    const char *mode = getenv("NVTXLOG_MODE");
    return !strcmp(mode ? mode : "enabled", name);
}

static uint8_t is_enabled(nvtxDomainHandle_t domain) {
    uint8_t answer = !mode_is("disabled");
    begin("is_enabled", domain);
    log_integer("answer", answer);
    log_end();
    return answer;
}

static uint64_t schema_register(nvtxDomainHandle_t domain, const nvtxPayloadSchemaAttr_t *schema) {
    uint64_t id = ((uint64_t)1 << 32) + new_id(); /* where the ids that a tool gives begin; the macro was renamed */
    begin("schema", domain);
    log_unsigned("id", id);
    log_text("message", schema->fieldMask & NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NAME ? schema->name : NULL);
    log_end();
    return id;
}

EXPORT int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t *module) {
    open_log();
    log_begin("extension");
    log_unsigned("module", module->moduleId);
    log_unsigned("compat", module->compatId);
    log_end();
    if (mode_is("init-fails")) return 0;
    if (module->moduleId == NVTX_EXT_PAYLOAD_MODULEID && module->segmentsCount) {
        intptr_t *slots = module->segments[0].functionSlots;
        slots[NVTX3EXT_CBID_nvtxPayloadSchemaRegister] = (intptr_t)schema_register;
        if (!mode_is("no-slot")) slots[NVTX3EXT_CBID_nvtxDomainIsEnabled] = (intptr_t)is_enabled;
    }
    return 1;
}
#endif
