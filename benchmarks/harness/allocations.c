/* Counts what malloc and its kin hand out and take back, in all threads of a process that this library is preloaded into.
 * Small blocks are not counted: they are Python's objects, not tensors. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SMALL = 1024 };

static atomic_long live, peak;

long live_bytes(void) { return live; }
long peak_bytes(void) { return peak; }
void reset_peak(void) { peak = live; }

static long counted(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    return size < SMALL ? 0 : (long)size;
}

static void change(long bytes) {
    long now = atomic_fetch_add(&live, bytes) + bytes;
    long before = peak;
    while (now > before && !atomic_compare_exchange_weak(&peak, &before, now)) {
    }
}

static void *made(void *block) {
    change(counted(block));
    return block;
}

void *malloc(size_t size) { return made(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return made(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return made(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *found = memalign(alignment, size);
    if (!found)
        return ENOMEM;
    *block = found;
    return 0;
}

void *realloc(void *block, size_t size) {
    long before = counted(block);
    void *moved = __libc_realloc(block, size);
    if (moved || !size)
        change(counted(moved) - before);
    return moved;
}

void free(void *block) {
    change(-counted(block));
    __libc_free(block);
}
