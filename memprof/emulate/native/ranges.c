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

/* Address space of the devices, handed out as CUDA's driver does on Linux (memprof/allocator/addresses.py tells the rule
 * and where it was read off): ranges of whole 32 MiB at the top of the highest gap; what fits into the free part of a
 * device's range goes there, lowest first; an empty range is a gap again. One byte tells of each page. */
#define SPACE ((size_t)4 << 40)
#define RANGE ((size_t)16) /* pages */
#define PAGES (SPACE / DEVICE_PAGE)
enum { TAKEN = 16, BEGINS = 32, MINE = 64 }; /* a segment's page; a range's first; of a range, whose device is in the low bits */

static unsigned char pages[PAGES];
static char *space;
static size_t lowest = PAGES; /* the first page that was ever in a range */

static size_t room_in_a_range(size_t n, int device) {
    size_t run = 0;
    for (size_t at = lowest; at < PAGES; at++) {
        if (!(pages[at] & MINE) || (pages[at] & TAKEN) || (pages[at] & 15) != device) { run = 0; continue; }
        if (pages[at] & BEGINS) run = 0;
        if (++run == n) return at + 1 - n;
    }
    return PAGES;
}

static size_t new_range(size_t n, int device) {
    size_t whole = round_up(n, RANGE), run = 0;
    for (size_t at = PAGES; at-- > 0;) {
        run = pages[at] ? 0 : run + 1;
        if (run < whole) continue;
        memset(pages + at, MINE | device, whole);
        pages[at] |= BEGINS;
        if (at < lowest) lowest = at;
        return at;
    }
    return PAGES;
}

void *take_addresses(size_t size, int device) {
    size_t n = size / DEVICE_PAGE;
    if (!space) space = map_memory(SPACE, PROT_NONE);
    if (!space) return NULL;
    size_t at = room_in_a_range(n, device);
    if (at == PAGES) at = new_range(n, device);
    if (at == PAGES || mprotect(space + at * DEVICE_PAGE, size, PROT_READ | PROT_WRITE)) return NULL;
    for (size_t i = 0; i < n; i++) pages[at + i] |= TAKEN;
    return space + at * DEVICE_PAGE;
}

void give_addresses_back(void *memory, size_t size) {
    size_t at = (size_t)((char *)memory - space) / DEVICE_PAGE, begin = at, end = at + 1;
    mmap(memory, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (size_t i = 0; i < size / DEVICE_PAGE; i++) pages[at + i] &= ~TAKEN;
    while (!(pages[begin] & BEGINS)) begin--;
    while (end < PAGES && (pages[end] & MINE) && !(pages[end] & BEGINS)) end++;
    for (size_t i = begin; i < end; i++) if (pages[i] & TAKEN) return;
    memset(pages + begin, 0, end - begin);
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
