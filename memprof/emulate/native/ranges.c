/* The table of mapped memory, sorted by address, and what of it counts against each card. */
#include "emulator.h"
#include <sys/mman.h>

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
size_t used[MAX_DEVICES], highest[MAX_DEVICES];
char has_context[MAX_DEVICES];

static struct range *ranges;
static size_t n_ranges, capacity;

int charge(int device, size_t bytes) {
    if (!has_context[device]) { /* the first use of a card makes the process's context on it */
        has_context[device] = 1;
        used[device] += settings.context;
    }
    if (bytes > settings.memory || used[device] > settings.memory - bytes) return 0;
    used[device] += bytes;
    if (used[device] > highest[device]) highest[device] = used[device];
    return 1;
}

/* The index of the first range whose base is above the address. */
static size_t first_above(uintptr_t address) {
    size_t low = 0, high = n_ranges;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (ranges[mid].base <= address) low = mid + 1;
        else high = mid;
    }
    return low;
}

void insert_range(struct range range) {
    if (n_ranges == capacity) {
        capacity = capacity ? 2 * capacity : 256;
        ranges = realloc(ranges, capacity * sizeof *ranges);
        if (!ranges) abort();
    }
    size_t at = first_above(range.base);
    memmove(ranges + at + 1, ranges + at, (n_ranges - at) * sizeof *ranges);
    ranges[at] = range;
    n_ranges++;
}

struct range *find_range(const void *pointer) {
    size_t at = first_above((uintptr_t)pointer);
    if (!at) return NULL;
    struct range *range = &ranges[at - 1];
    return (uintptr_t)pointer < range->base + range->size ? range : NULL;
}

int take_range(const void *base, struct range *out) {
    struct range *range = find_range(base);
    if (!range || range->base != (uintptr_t)base) return 0;
    *out = *range;
    if (range->kind == DEVICE) used[range->device] -= range->charged;
    memmove(range, range + 1, (size_t)(ranges + n_ranges - (range + 1)) * sizeof *range);
    n_ranges--;
    return 1;
}

/* NORESERVE: a page costs the host nothing until it is touched. */
void *map_memory(size_t size, int protection) {
    char *raw = mmap(NULL, size + DEVICE_PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    size_t head = (DEVICE_PAGE - (uintptr_t)raw % DEVICE_PAGE) % DEVICE_PAGE;
    if (head) munmap(raw, head);
    if (DEVICE_PAGE - head) munmap(raw + head + size, DEVICE_PAGE - head);
    return raw + head;
}
