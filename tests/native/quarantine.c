/* Preloaded, it never gives a freed block of the size of a profiler's buffers out again, and makes it unreadable:
 * what is written to memory that is gone crashes at once and in every run, not now and then. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define OFFSET 64UL
#define MAGIC 0x6b6e6f7264656461UL
#define LEAST 16384UL
#define MOST (4UL << 20)
#define EXPORT __attribute__((visibility("default")))

struct head {
    uint64_t magic;
    size_t mapped;
    size_t size;
};

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_realloc(void *, size_t);

static struct head *own(void *block) {
    if (((uintptr_t)block & (PAGE - 1)) != OFFSET) return NULL;
    struct head *head = (struct head *)((uintptr_t)block & ~(PAGE - 1));
    return head->magic == MAGIC ? head : NULL;
}

EXPORT void *malloc(size_t size) {
    if (size < LEAST || size > MOST) return __libc_malloc(size);
    size_t mapped = (size + OFFSET + PAGE - 1) & ~(PAGE - 1);
    struct head *head = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (head == MAP_FAILED) return __libc_malloc(size);
    head->magic = MAGIC;
    head->mapped = mapped;
    head->size = size;
    return (char *)head + OFFSET;
}

EXPORT void free(void *block) {
    struct head *head = block ? own(block) : NULL;
    if (!head) {
        __libc_free(block);
        return;
    }
    size_t mapped = head->mapped;
    madvise(head, mapped, MADV_DONTNEED);
    mprotect(head, mapped, PROT_NONE);
}

EXPORT void *realloc(void *block, size_t size) {
    struct head *head = block ? own(block) : NULL;
    if (!head) return __libc_realloc(block, size);
    void *copy = malloc(size);
    if (copy) {
        memcpy(copy, block, head->size < size ? head->size : size);
        free(block);
    }
    return copy;
}
