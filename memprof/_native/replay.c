/* Model PyTorch's caching allocator: memprof/allocator/model.py in C, rule by rule and under the same names.

   The Python model is the truth. tests/allocator/test_native.py holds this one to it, event by event and byte by byte;
   memprof/allocator/native.py says which of the two runs. Sentences of errors stand in Python: what is refused calls
   a method of the model that raises it.

   Blocks are Python objects, because callers keep them. A segment owns its blocks (one reference each) through the
   chain that begins with `first`; the free and unmapped lists of pools and the table of blocks in use only point. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((int64_t)1 << 20)
#define MIN_BLOCK 512
#define SMALL_LIMIT MIB
#define SMALL_SEGMENT (2 * MIB)
#define MIN_LARGE_SEGMENT (10 * MIB)
#define SEGMENT_ROUND (2 * MIB)
#define UNLIMITED ((int64_t)1 << 62)
#define HUGE_NEED (UNLIMITED + MIN_BLOCK) /* stands for all sizes above: no device has them */
#define DIVISIONS 16

typedef struct Heap Heap;
typedef struct Pool Pool;
typedef struct Segment Segment;

typedef struct Block {
    PyObject_HEAD
    int64_t address, size, requested, born;
    Pool *pool;
    Heap *heap; /* NULL once it is a part of another block, or its memory was given back */
    Segment *segment;
    struct Block *prev, *next;
    char free, mapped;
} Block;

struct Segment {
    int64_t address, shift, size, page;
    int expandable;
    size_t index; /* among the heap's */
    Block *first;
};

/* Sorted by size, then place; of unmapped blocks the size counts as 0, and the place is the address. */
typedef struct { int64_t size, place; Block *block; } Entry;
typedef struct { Entry *at; size_t length, room; } Sorted;

struct Pool {
    PyObject_HEAD
    Heap *heap; /* NULL once that is gone */
    int64_t pool, stream;
    char small;
    Sorted free, unmapped;
};

typedef struct { int64_t low, high; } Stretch;
typedef struct { Stretch *at; size_t length, room; } Stretches;
typedef struct { int64_t begin, end; Stretches rooms; } Range;
typedef struct { Range **at; size_t length, room; } Ranges;

struct Heap {
    PyObject_HEAD
    PyObject *settings, *capacity_given, *on_event, *before_release;
    PyObject *asked; /* borrowed: the size of the request that is running, where it is a huge one */
    char tells_blocks, expands, oldest_first, plain;
    int64_t reserved, active, allocated, requested, flushes;
    int64_t max_reserved, max_active, max_allocated, max_requested;
    int64_t at;
    int64_t capacity, split_limit, non_split_rounding, large_segment, divisions[DIVISIONS];
    double threshold;
    int64_t allowed;  /* what the process may reserve; -1 without a memory fraction */
    int64_t searches; /* of the default large pool, of all streams */
    int64_t placed;
    struct { Pool **at; size_t length, room; } pools;
    struct { Segment **at; size_t length, room; } segments;
    struct { Block **at; size_t length, mask; } live; /* open addressing, by address */
    Stretches gaps;
    Ranges order, with_room;
};

static PyTypeObject *block_type, *pool_type;
enum { ALLOC, FREE_REQUESTED, FREE_COMPLETED, OOM, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, ACTIONS };
static const char *const ACTION_NAMES[ACTIONS] = {
    "alloc", "free_requested", "free_completed", "oom", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap"};
static PyObject *actions[ACTIONS];

/* ------------------------------------------------------------------ tables */

/* Make room for one more entry; -1 without memory. */
#define MORE(table) ((table).length < (table).room ? 0 : widen((void **)&(table).at, &(table).room, sizeof *(table).at))

static int widen(void **at, size_t *room, size_t width)
{
    size_t more = *room ? 2 * *room : 16;
    void *wider = more > SIZE_MAX / 2 / width ? NULL : realloc(*at, more * width);
    if (wider == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *at = wider;
    *room = more;
    return 0;
}

#define OPEN_AT(table, i) \
    memmove((table).at + (i) + 1, (table).at + (i), ((table).length++ - (i)) * sizeof *(table).at)
#define CLOSE_AT(table, i) \
    memmove((table).at + (i), (table).at + (i) + 1, (--(table).length - (i)) * sizeof *(table).at)

/* Return the first entry that is not below this one. */
static size_t find(const Sorted *sorted, int64_t size, int64_t place)
{
    size_t low = 0, high = sorted->length;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const Entry *entry = sorted->at + middle;
        if (entry->size < size || (entry->size == size && entry->place < place))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int put(Sorted *sorted, int64_t size, int64_t place, Block *block)
{
    if (MORE(*sorted) < 0)
        return -1;
    size_t at = find(sorted, size, place);
    OPEN_AT(*sorted, at);
    sorted->at[at] = (Entry){size, place, block};
    return 0;
}

static int take_out(Sorted *sorted, int64_t size, int64_t place, const Block *block)
{
    size_t at = find(sorted, size, place);
    if (at == sorted->length || sorted->at[at].block != block) {
        PyErr_SetString(PyExc_KeyError, "a block is not where it was: a callback changed the model amid a change");
        return -1;
    }
    CLOSE_AT(*sorted, at);
    return 0;
}

/* -- blocks in use, by address */

static size_t slot_of(const Heap *h, int64_t address)
{
    return (size_t)(((uint64_t)address >> 9) * UINT64_C(0x9E3779B97F4A7C15) >> 20) & h->live.mask;
}

static Block *live_at(const Heap *h, int64_t address)
{
    if (h->live.at == NULL)
        return NULL;
    for (size_t slot = slot_of(h, address);; slot = (slot + 1) & h->live.mask) {
        Block *block = h->live.at[slot];
        if (block == NULL || block->address == address)
            return block;
    }
}

static int live_add(Heap *h, Block *block)
{
    if (h->live.at == NULL || 2 * (h->live.length + 1) > h->live.mask) {
        size_t old = h->live.at ? h->live.mask + 1 : 0, room = old ? 2 * old : 64;
        Block **before = h->live.at, **after = calloc(room, sizeof *after);
        if (after == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        h->live.at = after;
        h->live.mask = room - 1;
        for (size_t i = 0; i < old; i++)
            if (before[i] != NULL) {
                size_t slot = slot_of(h, before[i]->address);
                while (after[slot] != NULL)
                    slot = (slot + 1) & h->live.mask;
                after[slot] = before[i];
            }
        free(before);
    }
    size_t slot = slot_of(h, block->address);
    while (h->live.at[slot] != NULL)
        slot = (slot + 1) & h->live.mask;
    h->live.at[slot] = block;
    h->live.length++;
    return 0;
}

static void live_drop(Heap *h, const Block *block)
{
    size_t mask = h->live.mask, hole = slot_of(h, block->address);
    while (h->live.at[hole] != block) {
        if (h->live.at[hole] == NULL)
            return;
        hole = (hole + 1) & mask;
    }
    h->live.length--;
    for (size_t slot = (hole + 1) & mask; h->live.at[slot] != NULL; slot = (slot + 1) & mask) {
        size_t home = slot_of(h, h->live.at[slot]->address);
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            h->live.at[hole] = h->live.at[slot];
            hole = slot;
        }
    }
    h->live.at[hole] = NULL;
}

/* ------------------------------------------------------------------ addresses (memprof/allocator/addresses.py) */

#define RANGE (32 * MIB)
#define PAGE (2 * MIB)
#define TOP ((int64_t)1 << 52)
#define NO_ADDRESS (-1) /* none has room */
#define NO_MEMORY (-2)

static int64_t whole(int64_t size, int64_t unit)
{
    return (size / unit + (size % unit > 0)) * unit;
}

static size_t range_index(const Ranges *ranges, int64_t begin)
{
    size_t low = 0, high = ranges->length;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges->at[middle]->begin < begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int range_put(Ranges *ranges, Range *range)
{
    if (MORE(*ranges) < 0)
        return -1;
    size_t at = range_index(ranges, range->begin);
    OPEN_AT(*ranges, at);
    ranges->at[at] = range;
    return 0;
}

static void range_take_out(Ranges *ranges, const Range *range)
{
    size_t at = range_index(ranges, range->begin);
    CLOSE_AT(*ranges, at);
}

/* Add a free stretch, merged with those that it touches. */
static int stretch_add(Stretches *free_ones, int64_t low, int64_t high)
{
    if (MORE(*free_ones) < 0)
        return -1;
    size_t at = 0;
    while (at < free_ones->length && free_ones->at[at].low <= low)
        at++;
    int joins_before = at > 0 && free_ones->at[at - 1].high == low;
    int joins_after = at < free_ones->length && free_ones->at[at].low == high;
    if (joins_before && joins_after) {
        free_ones->at[at - 1].high = free_ones->at[at].high;
        CLOSE_AT(*free_ones, at);
    } else if (joins_before) {
        free_ones->at[at - 1].high = high;
    } else if (joins_after) {
        free_ones->at[at].low = low;
    } else {
        OPEN_AT(*free_ones, at);
        free_ones->at[at] = (Stretch){low, high};
    }
    return 0;
}

/* Open a range for `size` bytes at the top of the highest gap that has room. */
static int64_t open_range(Heap *h, int64_t size)
{
    int64_t wide = whole(size, RANGE);
    size_t at = h->gaps.length;
    while (at > 0 && h->gaps.at[at - 1].high - h->gaps.at[at - 1].low < wide)
        at--;
    if (at-- == 0)
        return NO_ADDRESS;
    Range *range = calloc(1, sizeof *range);
    if (range == NULL) {
        PyErr_NoMemory();
        return NO_MEMORY;
    }
    range->end = h->gaps.at[at].high;
    range->begin = range->end - wide;
    if (range_put(&h->order, range) < 0) {
        free(range);
        return NO_MEMORY;
    }
    if (h->gaps.at[at].low < range->begin)
        h->gaps.at[at].high = range->begin;
    else
        CLOSE_AT(h->gaps, at);
    if (size < wide) {
        if (stretch_add(&range->rooms, range->begin + size, range->end) < 0 || range_put(&h->with_room, range) < 0)
            return NO_MEMORY;
    }
    return range->begin;
}

static int64_t address_take(Heap *h, int64_t size)
{
    if (size > TOP)
        return NO_ADDRESS;
    size = whole(size, PAGE);
    for (size_t i = 0; i < h->with_room.length; i++) {
        Range *range = h->with_room.at[i];
        for (size_t at = 0; at < range->rooms.length; at++) {
            Stretch *room = range->rooms.at + at;
            if (room->high - room->low < size)
                continue;
            int64_t low = room->low;
            room->low += size;
            if (room->low == room->high)
                CLOSE_AT(range->rooms, at);
            if (range->rooms.length == 0)
                range_take_out(&h->with_room, range);
            return low;
        }
    }
    return open_range(h, size);
}

static int address_give_back(Heap *h, int64_t address, int64_t size)
{
    size_t at = range_index(&h->order, address + 1);
    if (at == 0)
        return 0;
    Range *range = h->order.at[at - 1];
    if (range->rooms.length == 0 && range_put(&h->with_room, range) < 0)
        return -1;
    if (stretch_add(&range->rooms, address, address + whole(size, PAGE)) < 0)
        return -1;
    if (range->rooms.length == 1 && range->rooms.at[0].low == range->begin && range->rooms.at[0].high == range->end) {
        range_take_out(&h->with_room, range);
        range_take_out(&h->order, range);
        int failed = stretch_add(&h->gaps, range->begin, range->end);
        free(range->rooms.at);
        free(range);
        return failed;
    }
    return 0;
}

/* ------------------------------------------------------------------ sizes (memprof/allocator/settings.py) */

static int bits(int64_t number)
{
    int found = 0;
    for (uint64_t rest = (uint64_t)number; rest; rest >>= 1)
        found++;
    return found;
}

static int64_t round_size(const Heap *h, int64_t size)
{
    if (size < MIN_BLOCK)
        return MIN_BLOCK;
    if (size > UNLIMITED)
        return HUGE_NEED;
    int length = bits(size), entry = length < 21 ? 0 : length - 21;
    int64_t divisions = h->divisions[entry < DIVISIONS ? entry : DIVISIONS - 1];
    if (divisions <= 1 || size <= MIN_BLOCK * divisions)
        return whole(size, MIN_BLOCK);
    int64_t floor = (int64_t)1 << (length - 1), step = floor >> (bits(divisions) - 1);
    return size == floor || step == 0 ? floor : whole(size, step);
}

static int64_t segment_size(const Heap *h, int64_t block)
{
    if (block <= SMALL_LIMIT)
        return SMALL_SEGMENT;
    return block < MIN_LARGE_SEGMENT ? h->large_segment : whole(block, SEGMENT_ROUND);
}

/* ------------------------------------------------------------------ what Python is told */

/* Call a method of the model that raises; `other` is left out below 0. */
static void refuse(Heap *h, const char *method, PyObject *one, int64_t other)
{
    PyObject *self = (PyObject *)h, *result = NULL;
    if (one != NULL && other >= 0)
        result = PyObject_CallMethod(self, method, "OL", one, (long long)other);
    else if (one != NULL)
        result = PyObject_CallMethod(self, method, "O", one);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_Format(PyExc_SystemError, "%s did not raise", method);
    }
}

static void refuse_number(Heap *h, const char *method, int64_t one, int64_t other)
{
    PyObject *number = PyLong_FromLongLong(one);
    refuse(h, method, number, other);
    Py_XDECREF(number);
}

static int emit_object(Heap *h, int action, int64_t address, PyObject *size, const Pool *home)
{
    PyObject *given[5] = {
        actions[action], PyLong_FromLongLong(address), size, PyLong_FromLongLong(home->stream),
        PyLong_FromLongLong(home->pool)};
    PyObject *result = NULL, *callback = h->on_event;
    if (given[1] && given[2] && given[3] && given[4]) {
        Py_INCREF(callback);
        result = PyObject_Vectorcall(callback, given, 5, NULL);
        Py_DECREF(callback);
    }
    Py_XDECREF(given[1]);
    Py_XDECREF(given[3]);
    Py_XDECREF(given[4]);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int has(const PyObject *callback)
{
    return callback != NULL && callback != Py_None;
}

static int emit(Heap *h, int action, int64_t address, int64_t size, const Pool *home)
{
    if (!has(h->on_event))
        return 0;
    PyObject *number = PyLong_FromLongLong(size);
    int failed = emit_object(h, action, address, number, home);
    Py_XDECREF(number);
    return failed;
}

static int tells(const Heap *h)
{
    return h->tells_blocks && has(h->on_event);
}

/* ------------------------------------------------------------------ blocks and pools */

static Block *new_block(Heap *h, int64_t address, int64_t size, Pool *pool, Segment *segment)
{
    Block *block = PyObject_New(Block, block_type);
    if (block == NULL)
        return NULL;
    block->address = address;
    block->size = size;
    block->requested = block->born = 0;
    block->pool = pool;
    Py_INCREF(pool);
    block->heap = h;
    block->segment = segment;
    block->prev = block->next = NULL;
    block->free = block->mapped = 1;
    return block;
}

/* Take a block out of its segment's chain for good. */
static void forget(Block *block)
{
    block->heap = NULL;
    block->segment = NULL;
    block->prev = block->next = NULL;
    Py_DECREF(block);
}

static int64_t place_of(const Block *block)
{
    return block->address + block->segment->shift;
}

static int insert(Block *block)
{
    block->free = 1;
    block->born = block->heap->searches;
    return put(&block->pool->free, block->size, place_of(block), block);
}

static int removed(Block *block)
{
    return take_out(&block->pool->free, block->size, place_of(block), block);
}

static int add_unmapped(Block *block)
{
    block->mapped = 0;
    block->free = 1;
    return put(&block->pool->unmapped, 0, block->address, block);
}

static int drop_unmapped(Block *block)
{
    return take_out(&block->pool->unmapped, 0, block->address, block);
}

/* Divide a block that is in no pool and return its second part, which is in no pool either. */
static Block *cut(Block *block, int64_t at)
{
    Block *tail = new_block(block->heap, at, block->address + block->size - at, block->pool, block->segment);
    if (tail == NULL)
        return NULL;
    tail->prev = block;
    tail->next = block->next;
    if (block->next != NULL)
        block->next->prev = tail;
    block->next = tail;
    block->size = at - block->address;
    return tail;
}

/* Make a neighbour, which is in no pool, a part of a block. */
static void absorb(Block *block, Block *neighbour)
{
    if (block->prev == neighbour) {
        block->address = neighbour->address;
        block->prev = neighbour->prev;
        if (block->prev != NULL)
            block->prev->next = block;
    } else {
        block->next = neighbour->next;
        if (block->next != NULL)
            block->next->prev = block;
    }
    block->size += neighbour->size;
    if (block->segment->first == neighbour)
        block->segment->first = block;
    forget(neighbour);
}

/* Merge a block with its free neighbours and put it back into its pool. */
static int release_to_pool(Block *block)
{
    Block *before = block->prev, *after = block->next;
    if (before != NULL && before->free && before->mapped) {
        if (removed(before) < 0)
            return -1;
        absorb(block, before);
    }
    if (after != NULL && after->free && after->mapped) {
        if (removed(after) < 0)
            return -1;
        absorb(block, after);
    }
    return insert(block);
}

static Pool *pool_of(Heap *h, int64_t need, int64_t stream, int64_t number)
{
    char small = need <= SMALL_LIMIT;
    for (size_t i = 0; i < h->pools.length; i++) {
        Pool *pool = h->pools.at[i];
        if (pool->small == small && pool->stream == stream && pool->pool == number)
            return pool;
    }
    if (MORE(h->pools) < 0)
        return NULL;
    Pool *pool = PyObject_New(Pool, pool_type);
    if (pool == NULL)
        return NULL;
    memset((char *)pool + offsetof(Pool, heap), 0, sizeof *pool - offsetof(Pool, heap));
    pool->heap = h;
    pool->pool = number;
    pool->stream = stream;
    pool->small = small;
    h->pools.at[h->pools.length++] = pool;
    return pool;
}

/* ------------------------------------------------------------------ segments */

static int64_t device_free(const Heap *h)
{
    if (h->capacity < 0)
        return UNLIMITED;
    return h->capacity > h->reserved ? h->capacity - h->reserved : 0;
}

static void reserve(Heap *h, int64_t size)
{
    h->reserved += size;
    if (h->reserved > h->max_reserved)
        h->max_reserved = h->reserved;
}

/* Return a new segment of one block of `home`, which is in no list; NULL with an exception. */
static Segment *new_segment(Heap *h, Pool *home, int64_t size, int expandable, int64_t page)
{
    if (MORE(h->segments) < 0)
        return NULL;
    int64_t address = address_take(h, size);
    if (address == NO_ADDRESS && h->asked != NULL)
        refuse(h, "_no_addresses", h->asked, page);
    else if (address == NO_ADDRESS)
        refuse_number(h, "_no_addresses", size, 0);
    if (address < 0)
        return NULL;
    Segment *segment = malloc(sizeof *segment);
    if (segment == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *segment = (Segment){address, h->oldest_first ? h->placed - address : 0, size, page, expandable, 0, NULL};
    segment->first = new_block(h, address, size, home, segment);
    if (segment->first == NULL) {
        free(segment);
        return NULL;
    }
    h->placed += size;
    segment->index = h->segments.length;
    h->segments.at[h->segments.length++] = segment;
    return segment;
}

/* Give a segment back whose only block is this one, which is in no list. */
static int end_segment(Heap *h, Block *block)
{
    Segment *segment = block->segment;
    Segment *last = h->segments.at[--h->segments.length];
    h->segments.at[segment->index] = last;
    last->index = segment->index;
    int failed = address_give_back(h, segment->address, segment->size);
    free(segment);
    forget(block);
    return failed;
}

static int release_segment(Heap *h, Block *block)
{
    int64_t address = block->address, size = block->size;
    Pool *home = block->pool;
    if (removed(block) < 0)
        return -1;
    h->reserved -= size;
    if (end_segment(h, block) < 0)
        return -1;
    return emit(h, SEGMENT_FREE, address, size, home);
}

/* Return a copy of blocks, each with a reference, that callbacks cannot change. */
static Block **copied(const Sorted *sorted, size_t length)
{
    Block **blocks = malloc((length + 1) * sizeof *blocks);
    if (blocks == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < length; i++) {
        blocks[i] = sorted->at[i].block;
        Py_INCREF(blocks[i]);
    }
    return blocks;
}

static void let_go(Block **blocks, size_t length)
{
    for (size_t i = 0; blocks != NULL && i < length; i++)
        Py_DECREF(blocks[i]);
    free(blocks);
}

static int is_cached(const Heap *h, const Block *block)
{
    return block->heap == h && block->free && block->mapped;
}

static int is_alone(const Block *block)
{
    return block->prev == NULL && block->next == NULL && !block->segment->expandable;
}

/* With a split limit, give back one oversize block that is large enough, else the largest that sum to it. */
static int release_available(Heap *h, Pool *home, int64_t need)
{
    if (h->split_limit == UNLIMITED)
        return 0;
    int64_t wanted = need > h->split_limit ? need : h->split_limit, released = 0;
    size_t index = find(&home->free, wanted, INT64_MIN), length = home->free.length;
    Block **blocks = copied(&home->free, length);
    int done = blocks ? 0 : -1;
    if (done == 0 && index < length && is_alone(blocks[index])) {
        done = release_segment(h, blocks[index]) < 0 ? -1 : 1;
    } else if (done == 0) {
        for (size_t i = index; i-- > 0 && done == 0;) {
            if (released >= wanted || blocks[i]->size < h->split_limit)
                break;
            if (is_cached(h, blocks[i]) && is_alone(blocks[i])) {
                released += blocks[i]->size;
                done = release_segment(h, blocks[i]) < 0 ? -1 : 0;
            }
        }
        done = done < 0 ? -1 : released >= wanted;
    }
    let_go(blocks, length);
    return done;
}

/* Give back the whole pages inside a free block. */
static int unmap(Heap *h, Block *block)
{
    Segment *segment = block->segment;
    int64_t page = segment->page, stop = block->address + block->size;
    int64_t begin = segment->address + whole(block->address - segment->address, page);
    int64_t end = segment->address + (stop - segment->address) / page * page;
    if (begin >= end)
        return 0;
    if (removed(block) < 0)
        return -1;
    if (block->address < begin) { /* the part before the pages keeps its memory */
        Block *head = block;
        if ((block = cut(head, begin)) == NULL || insert(head) < 0)
            return -1;
    }
    if (end < stop) {
        Block *tail = cut(block, end);
        if (tail == NULL || insert(tail) < 0)
            return -1;
    }
    h->reserved -= end - begin;
    if (emit(h, SEGMENT_UNMAP, begin, end - begin, block->pool) < 0)
        return -1;
    Block *beside[2] = {block->prev, block->next};
    for (int i = 0; i < 2; i++)
        if (beside[i] != NULL && !beside[i]->mapped) {
            if (drop_unmapped(beside[i]) < 0)
                return -1;
            absorb(block, beside[i]);
        }
    if (block->prev == NULL && block->next == NULL)
        return end_segment(h, block);
    return add_unmapped(block);
}

static int release_cached_of(Heap *h, Pool *home)
{
    size_t length = home->free.length;
    Block **blocks = copied(&home->free, length);
    int failed = blocks ? 0 : -1;
    for (size_t i = 0; i < length && !failed; i++)
        if (is_cached(h, blocks[i]) && is_alone(blocks[i]))
            failed = release_segment(h, blocks[i]);
    for (size_t i = 0; i < length && !failed; i++)
        if (is_cached(h, blocks[i]) && blocks[i]->segment->expandable)
            failed = unmap(h, blocks[i]);
    let_go(blocks, length);
    return failed;
}

/* Give back every segment without a block in use, large pools first, as torch does. */
static int release_cached(Heap *h)
{
    for (char small = 0; small < 2; small++) {
        Pool *done = NULL;
        for (;;) { /* by stream; a private pool keeps its memory while it lives */
            Pool *next = NULL;
            for (size_t i = 0; i < h->pools.length; i++) {
                Pool *pool = h->pools.at[i];
                if (pool->pool == 0 && pool->small == small && (done == NULL || pool->stream > done->stream)
                    && (next == NULL || pool->stream < next->stream))
                    next = pool;
            }
            if (next == NULL)
                break;
            if (release_cached_of(h, next) < 0)
                return -1;
            done = next;
        }
    }
    return 0;
}

/* Above the threshold, give back the unsplit large blocks that have been free the longest. */
static int collect_garbage(Heap *h)
{
    int64_t target = h->reserved - (int64_t)(h->threshold * (double)h->allowed), reclaimed = 0, total = 0;
    if (target <= 0)
        return 0;
    Sorted found = {NULL, 0, 0}; /* of an entry the size is the age */
    int failed = 0, freed = 1;
    for (size_t i = 0; i < h->pools.length; i++) {
        const Pool *pool = h->pools.at[i];
        for (size_t j = 0; pool->pool == 0 && !pool->small && j < pool->free.length && !failed; j++) {
            Block *block = pool->free.at[j].block;
            if (!is_alone(block) || (failed = MORE(found)) != 0)
                continue;
            found.at[found.length++] = (Entry){h->searches - block->born, 0, block};
            Py_INCREF(block);
            total += h->searches - block->born;
        }
    }
    size_t left = found.length;
    while (!failed && reclaimed < target && freed && left > 0) {
        double threshold = (double)total / (double)left;
        freed = 0;
        for (size_t i = 0; i < found.length && !failed; i++) {
            Entry *entry = found.at + i;
            if (entry->place || (double)entry->size < threshold || !is_cached(h, entry->block))
                continue;
            freed = 1;
            entry->place = 1;
            left--;
            reclaimed += entry->block->size;
            total -= entry->size;
            failed = release_segment(h, entry->block);
        }
    }
    for (size_t i = 0; i < found.length; i++)
        Py_DECREF(found.at[i].block);
    free(found.at);
    return failed;
}

/* ------------------------------------------------------------------ expandable segments */

/* Tell whether a block and the free or unmapped blocks after it hold so many bytes. */
static int free_run(const Block *at, int64_t need)
{
    int64_t total = 0;
    while (total < need) {
        total += at->size;
        if (at->next == NULL || !at->next->free)
            break;
        at = at->next;
    }
    return total >= need;
}

/* Return the lowest unmapped block that has room, with the free one before it; else a new range. */
static Block *expandable_candidate(Heap *h, Pool *home, int64_t need)
{
    for (size_t i = 0; i < home->unmapped.length; i++) {
        Block *block = home->unmapped.at[i].block;
        if (block->prev != NULL && block->prev->free)
            block = block->prev;
        if (free_run(block, need))
            return block;
    }
    int64_t most = (h->capacity < 0 ? (int64_t)80 << 30 : h->capacity) * 9 / 8;
    int64_t page = home->small ? SMALL_SEGMENT : h->large_segment;
    Segment *segment = new_segment(h, home, whole(most > need ? most : need, page), 1, page);
    if (segment == NULL || add_unmapped(segment->first) < 0)
        return NULL;
    return segment->first;
}

/* Map whole pages at the start of an unmapped block, which becomes part of the free one before it.

   Return it; NULL where the device is full, or with an exception. */
static Block *map(Heap *h, Block *block, int64_t size)
{
    int64_t mapped = whole(size, block->segment->page);
    if (mapped > block->size)
        mapped = block->size;
    if (mapped > device_free(h))
        return NULL;
    if (drop_unmapped(block) < 0)
        return NULL;
    if (mapped < block->size) {
        Block *rest = cut(block, block->address + mapped);
        if (rest == NULL || add_unmapped(rest) < 0)
            return NULL;
    }
    block->mapped = 1;
    reserve(h, mapped);
    if (emit(h, SEGMENT_MAP, block->address, mapped, block->pool) < 0 || release_to_pool(block) < 0)
        return NULL;
    return block;
}

/* Map pages until a free block of `need` bytes exists; take it out of its pool and return it. */
static Block *expand(Heap *h, Pool *home, int64_t need)
{
    Block *block = expandable_candidate(h, home, need);
    if (block != NULL && !block->mapped)
        block = map(h, block, need);
    while (block != NULL && block->size < need)
        block = block->next == NULL ? NULL : map(h, block->next, need - block->size);
    return block != NULL && removed(block) == 0 ? block : NULL;
}

/* ------------------------------------------------------------------ taking and dropping */

/* Return the bytes a block of an expandable segment can grow to: its own and the unmapped block after it. */
static int64_t room_of(const Block *block)
{
    return block->size + (block->next != NULL && !block->next->mapped ? block->next->size : 0);
}

/* Return the smallest free block that is large enough; NULL without one, or where split limits forbid it. */
static Block *best_fit(Heap *h, Pool *home, int64_t need)
{
    Sorted *list = &home->free;
    size_t index = find(list, need, INT64_MIN);
    if (index == list->length)
        return NULL;
    Block *block = list->at[index].block;
    if (!h->plain) {
        if (block->segment->expandable)
            /* Prefer the block with the least room to grow, which leaves the open end of the segment alone. */
            while (index + 1 < list->length && (block->prev != NULL || block->next != NULL)) {
                Block *other = list->at[index + 1].block;
                if (room_of(other) >= room_of(block))
                    break;
                index++;
                block = other;
            }
        if (need < h->split_limit && h->split_limit <= block->size)
            return NULL;
        if (need >= h->split_limit && block->size >= need + h->non_split_rounding)
            return NULL;
    }
    CLOSE_AT(*list, index);
    return block;
}

static Block *device_alloc(Heap *h, Pool *home, int64_t need)
{
    int64_t size = segment_size(h, need);
    /* torch compares the fraction with a whole segment's bytes, also where only pages are mapped. */
    if (h->allowed >= 0 && h->reserved + size > h->allowed)
        return NULL;
    if (h->expands)
        return expand(h, home, need);
    if (size > device_free(h))
        return NULL;
    Segment *segment = new_segment(h, home, size, 0, size);
    if (segment == NULL)
        return NULL;
    Block *block = segment->first;
    reserve(h, size);
    return emit(h, SEGMENT_ALLOC, segment->address, size, home) < 0 ? NULL : block;
}

/* Return a free block of new memory; where the device is full, give cached memory back first. */
static Block *grow(Heap *h, Pool *home, int64_t need, int64_t size)
{
    if (h->allowed >= 0 && h->threshold > 0 && collect_garbage(h) < 0)
        return NULL;
    Block *block = device_alloc(h, home, need);
    if (block != NULL || PyErr_Occurred())
        return block;
    if (has(h->before_release)) {
        PyObject *callback = Py_NewRef(h->before_release), *result = PyObject_CallNoArgs(callback);
        Py_DECREF(callback);
        if (result == NULL)
            return NULL;
        Py_DECREF(result);
    }
    int released = release_available(h, home, need);
    if (released > 0)
        block = device_alloc(h, home, need);
    if (block == NULL && !PyErr_Occurred()) {
        h->flushes++;
        if (release_cached(h) == 0)
            block = device_alloc(h, home, need);
    }
    if (block != NULL || PyErr_Occurred())
        return block;
    int64_t left = device_free(h);
    PyObject *number = h->asked ? Py_NewRef(h->asked) : PyLong_FromLongLong(size);
    if (number != NULL && (!has(h->on_event) || emit_object(h, OOM, left, number, home) == 0))
        refuse(h, "_full", number, left);
    Py_XDECREF(number);
    return NULL;
}

static int splits(const Heap *h, const Pool *home, int64_t need, int64_t rest)
{
    if (home->small || h->expands)
        return rest >= MIN_BLOCK;
    return need < h->split_limit && rest > SMALL_LIMIT;
}

#define RAISE_TO(highest, value) \
    do { \
        if ((value) > (highest)) \
            (highest) = (value); \
    } while (0)

/* Return a block in use, as a new reference; NULL with an exception. */
static Block *acquire(Heap *h, Pool *home, int64_t need, int64_t size)
{
    if (home->pool == 0 && !home->small)
        h->searches++;
    Block *block = best_fit(h, home, need);
    if (block == NULL && (block = grow(h, home, need, size)) == NULL)
        return NULL;
    int64_t rest = block->size - need;
    if (rest != 0 && splits(h, home, need, rest)) {
        Block *tail = cut(block, block->address + need);
        if (tail == NULL || insert(tail) < 0)
            return NULL;
    }
    block->free = 0;
    block->requested = size;
    if (live_add(h, block) < 0)
        return NULL;
    h->active += block->size;
    RAISE_TO(h->max_active, h->active);
    h->allocated += block->size;
    RAISE_TO(h->max_allocated, h->allocated);
    h->requested += size;
    RAISE_TO(h->max_requested, h->requested);
    Py_INCREF(block); /* what is told may free it, and give its memory back */
    if (tells(h) && emit(h, ALLOC, block->address, size, home) < 0)
        Py_CLEAR(block);
    return block;
}

static int request_free(Heap *h, Block *block, int told)
{
    h->allocated -= block->size;
    return told ? emit(h, FREE_REQUESTED, block->address, block->requested, block->pool) : 0;
}

static int complete_free(Heap *h, Block *block, int told)
{
    if (live_at(h, block->address) != block) { /* the callback of the request dropped it */
        refuse_number(h, "_no_block", block->address, -1);
        return -1;
    }
    live_drop(h, block);
    h->active -= block->size;
    h->requested -= block->requested;
    if (told && emit(h, FREE_COMPLETED, block->address, block->requested, block->pool) < 0)
        return -1;
    block->requested = 0;
    return release_to_pool(block);
}

/* Free a block in use, at once. */
static int drop(Heap *h, Block *block)
{
    if (live_at(h, block->address) != block) {
        refuse_number(h, "_no_block", block->address, -1);
        return -1;
    }
    int told = tells(h);
    Py_INCREF(block);
    int failed = request_free(h, block, told) < 0 || complete_free(h, block, told) < 0;
    Py_DECREF(block);
    return failed ? -1 : 0;
}

/* ------------------------------------------------------------------ the model's methods */

/* Read a number of bytes; what is above all devices becomes HUGE_NEED. */
static int bytes_of(PyObject *given, int64_t *size)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (number == -1 && PyErr_Occurred())
        return -1;
    *size = overflow > 0 || (overflow == 0 && number > UNLIMITED) ? HUGE_NEED : number;
    return 0;
}

/* Take a block for `given` bytes, which are `size` unless they are more than any device has. */
static Block *taken(Heap *h, Pool *home, int64_t need, PyObject *given, int64_t size)
{
    PyObject *before = h->asked;
    h->asked = size > UNLIMITED ? given : NULL;
    Block *block = acquire(h, home, need, size);
    h->asked = before;
    return block;
}

/* Read bytes by the name `what`, and optionally the stream and the number of a pool. */
static int read_request(PyObject *arguments, PyObject *names, char *what, PyObject **given, int64_t *bytes,
                        long long *stream, long long *number)
{
    char *known[] = {what, "stream", "pool", NULL};
    *stream = *number = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "O|LL", known, given, stream, number))
        return -1;
    return bytes_of(*given, bytes);
}

static PyObject *py_malloc(Heap *h, PyObject *arguments, PyObject *names)
{
    PyObject *given;
    long long stream, number;
    int64_t size;
    if (read_request(arguments, names, "size", &given, &size, &stream, &number) < 0)
        return NULL;
    if (size < 0) {
        refuse(h, "_no_size", given, -1);
        return NULL;
    }
    if (size == 0)
        return Py_BuildValue("ii", 0, 0);
    int64_t need = round_size(h, size);
    Pool *home = pool_of(h, need, stream, number);
    Block *block = home ? taken(h, home, need, given, size) : NULL;
    PyObject *found = block ? Py_BuildValue("LL", (long long)block->address, (long long)block->size) : NULL;
    Py_XDECREF(block);
    return found;
}

static int is_pool_of(const Heap *h, PyObject *home)
{
    return Py_TYPE(home) == pool_type && ((Pool *)home)->heap == h;
}

/* Refuse what no request rounds to. */
static int cannot_be(int64_t need, int64_t size)
{
    if (size > 0 && need >= size)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a block is of more than 0 bytes, and of no less than are asked for");
    return 1;
}

static PyObject *py_acquire(Heap *h, PyObject *const *given, Py_ssize_t count)
{
    int64_t need, size;
    if (count != 3 || !is_pool_of(h, given[0])) {
        PyErr_SetString(PyExc_TypeError, "acquire takes a pool and two sizes");
        return NULL;
    }
    if (bytes_of(given[1], &need) < 0 || bytes_of(given[2], &size) < 0 || cannot_be(need, size))
        return NULL;
    return (PyObject *)taken(h, (Pool *)given[0], need, given[2], size);
}

static PyObject *py_pool_of(Heap *h, PyObject *arguments, PyObject *names)
{
    PyObject *given;
    long long stream, number;
    int64_t need;
    if (read_request(arguments, names, "need", &given, &need, &stream, &number) < 0)
        return NULL;
    return Py_XNewRef((PyObject *)pool_of(h, need, stream, number));
}

/* Return the block in use at an address, else NULL. */
static Block *found_at(Heap *h, PyObject *address)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(address, &overflow);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    Block *block = overflow ? NULL : live_at(h, number);
    if (block == NULL)
        refuse(h, "_no_block", address, -1);
    return block;
}

static PyObject *none_unless(int failed)
{
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_free(Heap *h, PyObject *address)
{
    Block *block = found_at(h, address);
    return block ? none_unless(drop(h, block)) : NULL;
}

static PyObject *py_drop(Heap *h, PyObject *block)
{
    if (Py_TYPE(block) != block_type) {
        PyErr_SetString(PyExc_TypeError, "only a block of this model can be dropped");
        return NULL;
    }
    return none_unless(drop(h, (Block *)block));
}

static PyObject *py_block_at(Heap *h, PyObject *address)
{
    long long number = PyLong_AsLongLong(address);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    Block *block = live_at(h, number);
    if (block == NULL)
        PyErr_SetObject(PyExc_KeyError, address);
    return Py_XNewRef((PyObject *)block);
}

static PyObject *py_empty_cache(Heap *h, PyObject *Py_UNUSED(none))
{
    return none_unless(release_cached(h));
}

static int by_address(const void *one, const void *other)
{
    int64_t a = (*(Segment *const *)one)->address, b = (*(Segment *const *)other)->address;
    return (a > b) - (a < b);
}

static PyObject *py_chains(Heap *h, PyObject *Py_UNUSED(none))
{
    int collects = PyGC_Disable(); /* what is collected may call the model */
    size_t length = h->segments.length;
    Segment **sorted = malloc((length + 1) * sizeof *sorted);
    PyObject *chains = sorted ? PyList_New(0) : PyErr_NoMemory();
    if (sorted != NULL && length)
        memcpy(sorted, h->segments.at, length * sizeof *sorted);
    if (sorted != NULL)
        qsort(sorted, length, sizeof *sorted, by_address);
    int failed = chains == NULL;
    for (size_t i = 0; i < length && !failed; i++) {
        PyObject *blocks = PyList_New(0);
        failed = blocks == NULL;
        for (Block *block = sorted[i]->first; block != NULL && !failed; block = block->next)
            failed = PyList_Append(blocks, (PyObject *)block) < 0;
        PyObject *pair = failed ? NULL : PyTuple_Pack(2, sorted[i]->expandable ? Py_True : Py_False, blocks);
        failed = pair == NULL || PyList_Append(chains, pair) < 0;
        Py_XDECREF(pair);
        Py_XDECREF(blocks);
    }
    free(sorted);
    if (collects)
        PyGC_Enable();
    if (failed)
        Py_CLEAR(chains);
    return chains;
}

/* ------------------------------------------------------------------ many operations */

enum { TAKE, DROP, DROP_OLD };

/* Return what a list or tuple has there, as a borrowed reference. */
static PyObject *item(PyObject *given, int64_t index)
{
    if ((PyList_Check(given) || PyTuple_Check(given)) && index >= 0 && index < PySequence_Fast_GET_SIZE(given))
        return PySequence_Fast_GET_ITEM(given, index);
    PyErr_SetString(PyExc_IndexError, "an operation names what is not there");
    return NULL;
}

static int take_one(Heap *h, PyObject *const *given, int64_t place, int64_t number)
{
    PyObject *home = item(given[1], number), *need = item(given[2], number), *size = item(given[3], number);
    int64_t needed, asked;
    if (home == NULL || need == NULL || size == NULL || item(given[4], place) == NULL)
        return -1;
    if (!is_pool_of(h, home) || !PyLong_Check(need) || !PyLong_Check(size)) { /* reading others may run Python */
        PyErr_SetString(PyExc_TypeError, "a block is taken from a pool of this model, by whole bytes");
        return -1;
    }
    if (bytes_of(need, &needed) < 0 || bytes_of(size, &asked) < 0 || cannot_be(needed, asked))
        return -1;
    Py_INCREF(size);
    Block *block = taken(h, (Pool *)home, needed, size, asked);
    Py_DECREF(size);
    return block == NULL ? -1 : PyList_SetItem(given[4], place, (PyObject *)block);
}

static int drop_one(Heap *h, PyObject *list, int64_t place)
{
    PyObject *block = item(list, place);
    if (block == NULL)
        return -1;
    if (Py_TYPE(block) != block_type) {
        PyErr_SetString(PyExc_TypeError, "what is dropped is not a block");
        return -1;
    }
    if (drop(h, (Block *)block) < 0)
        return -1;
    return PyList_SetItem(list, place, Py_NewRef(Py_None));
}

/* run(operations, homes, needs, sizes, own, old): lists, the first four of them or tuples. */
static PyObject *py_run(Heap *h, PyObject *const *given, Py_ssize_t count)
{
    if (count != 6 || !(PyList_Check(given[0]) || PyTuple_Check(given[0])) || !PyList_Check(given[4]) ||
        !PyList_Check(given[5])) {
        PyErr_SetString(PyExc_TypeError, "run takes six lists");
        return NULL;
    }
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(given[0]); index++) {
        PyObject *entry = item(given[0], index);
        int numbers = PyTuple_Check(entry) && PyTuple_GET_SIZE(entry) == 3;
        for (Py_ssize_t i = 0; numbers && i < 3; i++)
            numbers = PyLong_Check(PyTuple_GET_ITEM(entry, i));
        if (!numbers) {
            PyErr_SetString(PyExc_TypeError, "an operation is a kind, a place and a size");
            return NULL;
        }
        long kind = PyLong_AsLong(PyTuple_GET_ITEM(entry, 0));
        long long place = PyLong_AsLongLong(PyTuple_GET_ITEM(entry, 1));
        long long number = PyLong_AsLongLong(PyTuple_GET_ITEM(entry, 2));
        if (PyErr_Occurred())
            return NULL;
        if (kind == TAKE)
            h->at = index;
        if ((kind == TAKE ? take_one(h, given, place, number) : drop_one(h, given[kind == DROP ? 4 : 5], place)) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

enum { REPLAY_FREE, REPLAY_FLUSH, REPLAY_ALLOC };

static int replayed(Heap *h, Py_buffer *columns, Block **blocks)
{
    const int64_t *whats = columns[0].buf, *rows = columns[1].buf, *sizes = columns[2].buf;
    const int64_t *streams = columns[3].buf, *pools = columns[4].buf;
    int64_t count = columns[2].len / 8;
    for (int64_t row = 0; row < count; row++) /* in the order in which the Python model makes its pools */
        if (pool_of(h, round_size(h, sizes[row]), streams[row], pools[row]) == NULL)
            return -1;
    for (Py_ssize_t i = 0; i < columns[0].len / 8; i++) {
        int64_t row = rows[i];
        if (i % 65536 == 65535 && PyErr_CheckSignals() < 0)
            return -1;
        if (whats[i] == REPLAY_FLUSH) {
            if (release_cached(h) < 0)
                return -1;
            continue;
        }
        if (row < 0 || row >= count || (blocks[row] == NULL) != (whats[i] == REPLAY_ALLOC)) {
            PyErr_SetString(PyExc_ValueError, "a program frees what it does not have");
            return -1;
        }
        if (whats[i] == REPLAY_FREE) {
            int failed = drop(h, blocks[row]);
            Py_CLEAR(blocks[row]);
            if (failed)
                return -1;
            continue;
        }
        int64_t need = round_size(h, sizes[row]);
        Pool *home = pool_of(h, need, streams[row], pools[row]);
        Block *block = home ? acquire(h, home, need, sizes[row]) : NULL;
        if (block == NULL)
            return -1;
        blocks[row] = block;
    }
    return 0;
}

/* replay(what, row, requested, stream, pool): columns of 64 bit; the first two by event, the others by row. */
static PyObject *py_replay(Heap *h, PyObject *arguments)
{
    Py_buffer columns[5];
    h->asked = NULL;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*y*", columns, columns + 1, columns + 2, columns + 3, columns + 4))
        return NULL;
    Py_ssize_t events = columns[0].len, rows = columns[2].len;
    Block **blocks = NULL;
    int failed = -1;
    if (columns[1].len != events || columns[3].len != rows || columns[4].len != rows || events % 8 || rows % 8)
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
    else if ((blocks = calloc((size_t)rows / 8 + 1, sizeof *blocks)) == NULL)
        PyErr_NoMemory();
    else
        failed = replayed(h, columns, blocks);
    for (Py_ssize_t i = 0; blocks != NULL && i < rows / 8; i++)
        Py_XDECREF(blocks[i]);
    free(blocks);
    for (int i = 0; i < 5; i++)
        PyBuffer_Release(columns + i);
    return none_unless(failed);
}

/* ------------------------------------------------------------------ the types */

static int number_of(PyObject *settings, const char *name, int64_t low, int64_t high, int64_t *found)
{
    PyObject *value = PyObject_GetAttrString(settings, name);
    if (value == NULL)
        return -1;
    long long number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    if (number == -1 && PyErr_Occurred())
        return -1;
    if (number < low || number > high) {
        PyErr_Format(PyExc_ValueError, "%s is beyond what is modelled here", name);
        return -1;
    }
    *found = number;
    return 0;
}

static int read_divisions(Heap *h, PyObject *settings)
{
    PyObject *given = PyObject_GetAttrString(settings, "roundup_divisions");
    int failed = given == NULL || !PyTuple_Check(given) || PyTuple_GET_SIZE(given) != DIVISIONS;
    for (int i = 0; i < DIVISIONS && !failed; i++) {
        h->divisions[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
        failed = PyErr_Occurred() || h->divisions[i] < 0 || h->divisions[i] > 1 << 30;
    }
    Py_XDECREF(given);
    if (failed && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "roundup_divisions are beyond what is modelled here");
    return failed ? -1 : 0;
}

/* Heap(settings, capacity=None, on_event=None); a ValueError or OverflowError leaves it to the Python model. */
static int init(Heap *h, PyObject *arguments, PyObject *names)
{
    static char *known[] = {"settings", "capacity", "on_event", NULL};
    PyObject *settings, *capacity = Py_None, *on_event = Py_None;
    int64_t expands, oldest_first;
    if (h->settings != NULL) {
        PyErr_SetString(PyExc_TypeError, "a model begins once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "O|OO", known, &settings, &capacity, &on_event)
        || number_of(settings, "large_segment_size", MIN_LARGE_SEGMENT, TOP, &h->large_segment) < 0
        || number_of(settings, "max_split_size", h->large_segment, UNLIMITED, &h->split_limit) < 0
        || number_of(settings, "max_non_split_rounding", 0, TOP, &h->non_split_rounding) < 0
        || number_of(settings, "expandable_segments", 0, 1, &expands) < 0
        || number_of(settings, "oldest_first", 0, 1, &oldest_first) < 0 || read_divisions(h, settings) < 0)
        return -1;
    PyObject *allowed = PyObject_GetAttrString(settings, "allowed_bytes");
    h->allowed = allowed == NULL || allowed == Py_None ? -1 : PyLong_AsLongLong(allowed);
    int unlimited = allowed == Py_None;
    Py_XDECREF(allowed);
    if (PyErr_Occurred())
        return -1;
    PyObject *threshold = PyObject_GetAttrString(settings, "garbage_collection_threshold");
    h->threshold = threshold ? PyFloat_AsDouble(threshold) : -1;
    Py_XDECREF(threshold);
    h->capacity = capacity == Py_None ? -1 : PyLong_AsLongLong(capacity);
    if (PyErr_Occurred())
        return -1;
    if (!(h->threshold >= 0 && h->threshold <= 1) || h->capacity < -(capacity == Py_None) || h->capacity > TOP
        || h->allowed < -unlimited || h->allowed > TOP) {
        PyErr_SetString(PyExc_ValueError, "a setting is beyond what is modelled here");
        return -1;
    }
    if (h->settings != NULL || stretch_add(&h->gaps, 0, TOP) < 0) {
        if (h->settings != NULL)
            PyErr_SetString(PyExc_TypeError, "a model begins once");
        return -1;
    }
    h->expands = (char)expands;
    h->oldest_first = (char)oldest_first;
    h->plain = h->split_limit == UNLIMITED && !expands;
    h->tells_blocks = 1;
    h->settings = Py_NewRef(settings);
    h->capacity_given = Py_NewRef(capacity);
    h->on_event = Py_NewRef(on_event);
    h->before_release = Py_NewRef(Py_None);
    return 0;
}

static int heap_traverse(Heap *h, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(h));
    Py_VISIT(h->settings);
    Py_VISIT(h->capacity_given);
    Py_VISIT(h->on_event);
    Py_VISIT(h->before_release);
    return 0;
}

static int heap_clear(Heap *h)
{
    Py_CLEAR(h->on_event);
    Py_CLEAR(h->before_release);
    return 0;
}

static void heap_dealloc(Heap *h)
{
    PyTypeObject *type = Py_TYPE(h);
    PyObject_GC_UnTrack(h);
    heap_clear(h);
    Py_CLEAR(h->settings);
    Py_CLEAR(h->capacity_given);
    for (size_t i = 0; i < h->segments.length; i++) {
        for (Block *block = h->segments.at[i]->first, *next; block != NULL; block = next) {
            next = block->next;
            forget(block);
        }
        free(h->segments.at[i]);
    }
    for (size_t i = 0; i < h->pools.length; i++) {
        h->pools.at[i]->heap = NULL;
        h->pools.at[i]->free.length = h->pools.at[i]->unmapped.length = 0;
        Py_DECREF(h->pools.at[i]);
    }
    for (size_t i = 0; i < h->order.length; i++) {
        free(h->order.at[i]->rooms.at);
        free(h->order.at[i]);
    }
    free(h->segments.at);
    free(h->pools.at);
    free(h->live.at);
    free(h->gaps.at);
    free(h->order.at);
    free(h->with_room.at);
    type->tp_free((PyObject *)h);
    Py_DECREF(type);
}

static PyMethodDef heap_methods[] = {
    {"malloc", (PyCFunction)(void *)py_malloc, METH_VARARGS | METH_KEYWORDS, NULL},
    {"pool_of", (PyCFunction)(void *)py_pool_of, METH_VARARGS | METH_KEYWORDS, NULL},
    {"acquire", (PyCFunction)(void *)py_acquire, METH_FASTCALL, NULL},
    {"drop", (PyCFunction)py_drop, METH_O, NULL},
    {"free", (PyCFunction)py_free, METH_O, NULL},
    {"block_at", (PyCFunction)py_block_at, METH_O, NULL},
    {"empty_cache", (PyCFunction)py_empty_cache, METH_NOARGS, NULL},
    {"chains", (PyCFunction)py_chains, METH_NOARGS, NULL},
    {"run", (PyCFunction)(void *)py_run, METH_FASTCALL, NULL},
    {"replay", (PyCFunction)py_replay, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

#define TOTAL(name) {#name, T_LONGLONG, offsetof(Heap, name), 0, NULL}
static PyMemberDef heap_members[] = {
    TOTAL(reserved), TOTAL(active), TOTAL(allocated), TOTAL(requested), TOTAL(flushes), TOTAL(max_reserved),
    TOTAL(max_active), TOTAL(max_allocated), TOTAL(max_requested), TOTAL(at),
    {"settings", T_OBJECT, offsetof(Heap, settings), READONLY, NULL},
    {"capacity", T_OBJECT, offsetof(Heap, capacity_given), READONLY, NULL},
    {"on_event", T_OBJECT, offsetof(Heap, on_event), 0, NULL},
    {"before_release", T_OBJECT, offsetof(Heap, before_release), 0, NULL},
    {"tells_blocks", T_BOOL, offsetof(Heap, tells_blocks), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot heap_slots[] = {
    {Py_tp_doc, "Model the allocator of one device; see memprof.allocator.model.CachingAllocator."},
    {Py_tp_new, (void *)PyType_GenericNew}, {Py_tp_init, (void *)init}, {Py_tp_dealloc, (void *)heap_dealloc},
    {Py_tp_traverse, (void *)heap_traverse}, {Py_tp_clear, (void *)heap_clear}, {Py_tp_methods, heap_methods},
    {Py_tp_members, heap_members}, {0, NULL}};

static void block_dealloc(Block *block)
{
    PyTypeObject *type = Py_TYPE(block);
    Py_DECREF(block->pool);
    PyObject_Free(block);
    Py_DECREF(type);
}

#define NUMBER(name, flags) {#name, T_LONGLONG, offsetof(Block, name), flags, NULL}
static PyMemberDef block_members[] = {
    NUMBER(address, READONLY), NUMBER(size, READONLY), NUMBER(requested, 0), NUMBER(born, READONLY),
    {"pool", T_OBJECT, offsetof(Block, pool), READONLY, NULL}, {"free", T_BOOL, offsetof(Block, free), READONLY, NULL},
    {"mapped", T_BOOL, offsetof(Block, mapped), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot block_slots[] = {
    {Py_tp_dealloc, (void *)block_dealloc}, {Py_tp_members, block_members}, {0, NULL}};

static void pool_dealloc(Pool *pool)
{
    PyTypeObject *type = Py_TYPE(pool);
    free(pool->free.at);
    free(pool->unmapped.at);
    PyObject_Free(pool);
    Py_DECREF(type);
}

static PyObject *pool_free(Pool *pool, void *Py_UNUSED(closure))
{
    int collects = PyGC_Disable();
    PyObject *found = PyList_New((Py_ssize_t)pool->free.length);
    for (size_t i = 0; found != NULL && i < pool->free.length; i++) {
        PyObject *pair = Py_BuildValue("LL", (long long)pool->free.at[i].size, (long long)pool->free.at[i].place);
        if (pair == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, (Py_ssize_t)i, pair);
    }
    if (collects)
        PyGC_Enable();
    return found;
}

static PyMemberDef pool_members[] = {
    {"pool", T_LONGLONG, offsetof(Pool, pool), READONLY, NULL},
    {"stream", T_LONGLONG, offsetof(Pool, stream), READONLY, NULL},
    {"small", T_BOOL, offsetof(Pool, small), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyGetSetDef pool_getters[] = {{"free", (getter)pool_free, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot pool_slots[] = {
    {Py_tp_dealloc, (void *)pool_dealloc}, {Py_tp_members, pool_members},
    {Py_tp_getset, pool_getters}, {0, NULL}};

#define FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION)
static PyType_Spec heap_spec = {
    "memprof._native.replay.Heap", sizeof(Heap), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    heap_slots};
static PyType_Spec block_spec = {"memprof._native.replay.Block", sizeof(Block), 0, FLAGS, block_slots};
static PyType_Spec pool_spec = {"memprof._native.replay.Pool", sizeof(Pool), 0, FLAGS, pool_slots};

static int start(PyObject *module)
{
    for (int i = 0; i < ACTIONS; i++)
        if (actions[i] == NULL && (actions[i] = PyUnicode_InternFromString(ACTION_NAMES[i])) == NULL)
            return -1;
    if (block_type == NULL && (block_type = (PyTypeObject *)PyType_FromSpec(&block_spec)) == NULL)
        return -1;
    if (pool_type == NULL && (pool_type = (PyTypeObject *)PyType_FromSpec(&pool_spec)) == NULL)
        return -1;
    PyObject *heap = PyType_FromSpec(&heap_spec);
    int failed = heap == NULL || PyModule_AddObjectRef(module, "Heap", heap) < 0
                 || PyModule_AddObjectRef(module, "Block", (PyObject *)block_type) < 0
                 || PyModule_AddObjectRef(module, "Pool", (PyObject *)pool_type) < 0;
    Py_XDECREF(heap);
    return failed ? -1 : PyModule_AddIntConstant(module, "VERSION", 3);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "replay", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_replay(void)
{
    return PyModuleDef_Init(&definition);
}
