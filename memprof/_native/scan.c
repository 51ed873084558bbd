/* Scan a memory snapshot's pickle into columns, in one pass, as its bytes arrive.

   A snapshot is a dict whose "device_traces" are lists of events, each a small dict, by the million. An event
   becomes one row of the columns below as soon as its dict is filled; nothing else of it is kept. All else (segments,
   settings, the "memprof" key) is kept as words and built as Python objects at the end.

   The scanner accepts less than memprof.snapshot.opcodes does: the opcodes that torch and memprof write, used the way
   Python's pickler uses them. Whatever is otherwise it gives up on, without a reason: the Python reader then reads
   the file and says what is wrong with it. Nothing in the file is ever executed; no name in it is looked up.

   Memory stays in proportion to the bytes read: each opcode adds a constant number of bytes to the tables. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A value is a word: three bits say what it is, the others are a number, or an index into a table. */
typedef uint64_t Word;
enum { NONE, BOOL, INT, TEXT, FLOAT, PAIR, BOX, WIDE }; /* WIDE: an unsigned number of 2^63 or more */
#define WORD(tag, value) ((Word)(value) << 3 | (tag))
#define TAG(word) ((int)((word) & 7))
#define INDEX(word) ((size_t)((word) >> 3))
#define NUMBER(word) ((int64_t)(word) >> 3)
#define LARGEST ((int64_t)1 << 60)

#define NO_ID UINT32_MAX
#define MOST_PROBES 1000 /* a table in which a search is longer was made to be slow */
#define MOST_SHAPES 64
#define MOST_KEYS 32
#define MOST_DEPTH 100
#define ODD_TUPLES 12 /* as memprof.snapshot.opcodes allows */

enum { LIST, DICT, TUPLE, ROW };
typedef struct { uint32_t kind, first, last; } Box; /* a list's or dict's chunks; of a row its number */
typedef struct { uint64_t begin; uint32_t length, hash, next; } Chunk;
typedef struct { uint64_t begin; uint32_t length, hash; PyObject *made; uint8_t action; } Text;
typedef struct { uint32_t keys, field[10]; Word key[MOST_KEYS]; int is_event; } Shape;

enum { ACTION, ADDRESS, SIZE, STREAM, TIME, FRAMES, POOL, METADATA, CONTEXT, DEVICE_FREE, FIELDS };
static const char *const FIELD_NAMES[FIELDS] = {
    "action", "addr", "size", "stream", "time_us", "frames", "pool_id", "user_metadata", "compile_context",
    "device_free"};
enum { HAS_TIME = 1, KNOWS_TIME = 2, HAS_POOL = 4, HAS_METADATA = 8, HAS_CONTEXT = 16 };

enum { C_ACTION, C_FLAGS, C_POOL, C_FRAMES, C_METADATA, C_ADDRESS, C_SIZE, C_STREAM, C_TIME, COLUMNS };
static const char *const COLUMN_NAMES[COLUMNS] = {
    "action", "flags", "pool", "stack", "metadata", "address", "size", "stream", "time_us"};
static const uint8_t COLUMN_WIDTHS[COLUMNS] = {1, 1, 4, 4, 4, 8, 8, 8, 8};

#define TABLE(type) struct { type *at; size_t length, room; }
typedef struct {
    PyObject_HEAD
    TABLE(uint8_t) input;  /* bytes that do not make a whole opcode yet */
    uint64_t seen, opened, frame_end; /* bytes before the input; "}" and "]" among the bytes; where a frame ends */
    uint64_t counted;      /* bytes without frames' headers */
    enum { BEGIN, FRAMED, BETWEEN, UNFRAMED } framing;
    int started, stopped, refused, odd_tuples;
    uint32_t history;      /* the last opcodes */
    TABLE(Word) stack;
    TABLE(size_t) marks;
    TABLE(Word) memo;
    TABLE(Word) words;     /* what boxes hold */
    TABLE(Box) boxes;
    TABLE(Chunk) chunks;
    TABLE(uint32_t) chunk_slots;
    TABLE(Text) texts;
    TABLE(uint8_t) bytes;  /* of texts */
    TABLE(uint32_t) text_slots;
    TABLE(double) floats;
    TABLE(uint64_t) wide;
    Shape shapes[MOST_SHAPES];
    int n_shapes;
    uint32_t field_text[FIELDS], actions[256];
    int n_actions;
    PyObject *column[COLUMNS];
    size_t rows, row_room;
    PyObject **built;      /* while finishing: the object of each box */
    PyObject **built_pairs;
} Scanner;

/* Make room for so many entries; ``table`` is where the pointer to them stands. False: no memory. */
static int grow(void *table, size_t *room, size_t needed, size_t width)
{
    void *at;
    memcpy(&at, table, sizeof at);
    size_t wanted = *room + *room / 2 + 64;
    if (wanted < needed)
        wanted = needed;
    if (wanted > (size_t)PY_SSIZE_T_MAX / width)
        return 0;
    if ((at = realloc(at, wanted * width)) == NULL)
        return 0;
    memcpy(table, &at, sizeof at);
    *room = wanted;
    return 1;
}
#define GROW(table, more) \
    ((table).length + (more) <= (table).room \
     || grow(&(table).at, &(table).room, (table).length + (more), sizeof *(table).at))

/* What a step of the scan comes to. */
enum { REFUSED = -2, NO_MEMORY = -1, MORE = 0, DONE = 1 };
#define PUSH(table, value) \
    do { if (!GROW(table, 1)) return NO_MEMORY; (table).at[(table).length++] = (value); } while (0)

static uint32_t hash_of(const void *data, size_t length)
{
    const uint8_t *p = data;
    uint64_t h = 0x9E3779B97F4A7C15u ^ length;
    for (; length >= 8; p += 8, length -= 8) {
        uint64_t part;
        memcpy(&part, p, 8);
        h = (h ^ part) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    for (; length; p++, length--)
        h = (h ^ *p) * 0x100000001B3u;
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9u;
    return (uint32_t)(h >> 32);
}

/* Texts and interned chunks are found by open addressing; a slot holds an index plus one. */
static int more_slots(uint32_t **slots, size_t *room, size_t used, const uint8_t *entries, size_t width, size_t offset)
{
    if (used * 2 < *room)
        return 1;
    size_t wanted = *room ? *room * 2 : 1024;
    uint32_t *larger = calloc(wanted, sizeof *larger);
    if (larger == NULL)
        return 0;
    for (size_t i = 0; i < *room; i++)
        if ((*slots)[i]) {
            uint32_t hash;
            memcpy(&hash, entries + width * ((*slots)[i] - 1) + offset, sizeof hash);
            size_t at = hash & (wanted - 1);
            while (larger[at])
                at = (at + 1) & (wanted - 1);
            larger[at] = (*slots)[i];
        }
    free(*slots);
    *slots = larger;
    *room = wanted;
    return 1;
}

static int intern_text(Scanner *s, const uint8_t *data, size_t length, uint32_t *id)
{
    if (length > UINT32_MAX || s->texts.length >= NO_ID - 1)
        return REFUSED;
    if (!more_slots(&s->text_slots.at, &s->text_slots.room, s->text_slots.length, (uint8_t *)s->texts.at, sizeof(Text),
                    offsetof(Text, hash)))
        return NO_MEMORY;
    uint32_t hash = hash_of(data, length);
    size_t mask = s->text_slots.room - 1, at = hash & mask;
    for (int probes = 0; s->text_slots.at[at]; at = (at + 1) & mask) {
        Text *known = &s->texts.at[s->text_slots.at[at] - 1];
        if (known->hash == hash && known->length == length
            && (length == 0 || memcmp(s->bytes.at + known->begin, data, length) == 0)) {
            *id = s->text_slots.at[at] - 1;
            return DONE;
        }
        if (++probes > MOST_PROBES)
            return REFUSED;
    }
    for (size_t i = 0; i < length; i++)
        if (data[i] >= 0x80) { /* must be what Python can decode */
            PyObject *text = PyUnicode_DecodeUTF8((const char *)data, (Py_ssize_t)length, "surrogatepass");
            if (text == NULL) {
                PyErr_Clear();
                return REFUSED;
            }
            Py_DECREF(text);
            break;
        }
    Text text = {s->bytes.length, (uint32_t)length, hash, NULL, 0};
    if (!GROW(s->bytes, length))
        return NO_MEMORY;
    if (length)
        memcpy(s->bytes.at + s->bytes.length, data, length);
    s->bytes.length += length;
    PUSH(s->texts, text);
    s->text_slots.at[at] = (uint32_t)s->texts.length;
    s->text_slots.length++;
    *id = (uint32_t)s->texts.length - 1;
    return DONE;
}

static int add_chunk(Scanner *s, const Word *words, size_t length, uint32_t hash, uint32_t *id)
{
    if (s->chunks.length >= NO_ID - 1 || length > UINT32_MAX)
        return REFUSED;
    Chunk chunk = {s->words.length, (uint32_t)length, hash, NO_ID};
    if (!GROW(s->words, length))
        return NO_MEMORY;
    if (length)
        memcpy(s->words.at + s->words.length, words, length * sizeof(Word));
    s->words.length += length;
    PUSH(s->chunks, chunk);
    *id = (uint32_t)s->chunks.length - 1;
    return DONE;
}

/* Find or keep a chunk of these words. Interned chunks never have a next one. */
static int intern_chunk(Scanner *s, const Word *words, size_t length, uint32_t *id)
{
    if (!more_slots(&s->chunk_slots.at, &s->chunk_slots.room, s->chunk_slots.length, (uint8_t *)s->chunks.at,
                    sizeof(Chunk), offsetof(Chunk, hash)))
        return NO_MEMORY;
    uint32_t hash = hash_of(words, length * sizeof(Word));
    size_t mask = s->chunk_slots.room - 1, at = hash & mask;
    for (int probes = 0; s->chunk_slots.at[at]; at = (at + 1) & mask) {
        Chunk *known = &s->chunks.at[s->chunk_slots.at[at] - 1];
        if (known->hash == hash && known->length == length
            && memcmp(s->words.at + known->begin, words, length * sizeof(Word)) == 0) {
            *id = s->chunk_slots.at[at] - 1;
            return DONE;
        }
        if (++probes > MOST_PROBES)
            return REFUSED;
    }
    int done = add_chunk(s, words, length, hash, id);
    if (done != DONE)
        return done;
    s->chunk_slots.at[at] = *id + 1;
    s->chunk_slots.length++;
    return DONE;
}

/* Add words at the end of a list or dict. A list's first words are interned: most lists are stacks seen before. */
static int extend(Scanner *s, uint32_t index, const Word *words, size_t length)
{
    Box *box = &s->boxes.at[index];
    uint32_t added;
    int done;
    if (box->first == NO_ID && box->kind == LIST) {
        if ((done = intern_chunk(s, words, length, &added)) != DONE)
            return done;
    } else {
        if (box->first != NO_ID && box->first == box->last) { /* perhaps interned: continue a copy of its header */
            Chunk copy = s->chunks.at[box->first];
            if (s->chunks.length >= NO_ID - 1)
                return REFUSED;
            copy.next = NO_ID;
            PUSH(s->chunks, copy);
            box->first = box->last = (uint32_t)s->chunks.length - 1;
        }
        if ((done = add_chunk(s, words, length, 0, &added)) != DONE)
            return done;
    }
    if (box->first == NO_ID)
        box->first = added;
    else
        s->chunks.at[box->last].next = added;
    box->last = added;
    return DONE;
}

static int row_room(Scanner *s)
{
    if (s->rows < s->row_room)
        return DONE;
    if (s->rows >= NO_ID - 1)
        return REFUSED;
    size_t room = s->row_room + s->row_room / 2 + 1024;
    for (int c = 0; c < COLUMNS; c++) {
        Py_ssize_t size = (Py_ssize_t)(room * COLUMN_WIDTHS[c]);
        if (s->column[c] == NULL)
            s->column[c] = PyBytes_FromStringAndSize(NULL, size);
        else
            _PyBytes_Resize(&s->column[c], size);
        if (s->column[c] == NULL)
            return NO_MEMORY;
    }
    s->row_room = room;
    return DONE;
}
#define CELL(s, type, c, row) (((type *)PyBytes_AS_STRING((s)->column[c]))[row])

/* Find the shape of a dict with these keys: which of its values are an event's fields. */
static Shape *shape_of(Scanner *s, const Word *pairs, size_t keys)
{
    for (int i = 0; i < s->n_shapes; i++) {
        Shape *shape = &s->shapes[i];
        if (shape->keys != keys)
            continue;
        size_t k = 0;
        while (k < keys && shape->key[k] == pairs[2 * k])
            k++;
        if (k == keys)
            return shape;
    }
    if (s->n_shapes == MOST_SHAPES)
        return NULL;
    Shape *shape = &s->shapes[s->n_shapes];
    shape->keys = (uint32_t)keys;
    shape->is_event = 1;
    for (int f = 0; f < FIELDS; f++)
        shape->field[f] = NO_ID;
    for (size_t k = 0; k < keys; k++) {
        Word key = shape->key[k] = pairs[2 * k];
        if (TAG(key) != TEXT)
            shape->is_event = 0;
        for (size_t other = 0; other < k; other++)
            if (shape->key[other] == key)
                shape->is_event = 0;
        for (int f = 0; f < FIELDS; f++)
            if (key == WORD(TEXT, s->field_text[f]))
                shape->field[f] = (uint32_t)k;
    }
    if (shape->field[ACTION] == NO_ID || shape->field[SIZE] == NO_ID)
        shape->is_event = 0;
    s->n_shapes++;
    return shape;
}

/* The bits of an address or a stream; 0 for none. */
static int64_t handle(const Scanner *s, Word word)
{
    return TAG(word) == WIDE ? (int64_t)s->wide.at[INDEX(word)] : TAG(word) == INT ? NUMBER(word) : 0;
}

/* Make a row of a dict's pairs. MORE: they are no event as torch writes one, and stay a dict. */
static int add_row(Scanner *s, const Word *pairs, size_t keys, uint32_t *row)
{
    size_t k = 0;
    while (k < keys && pairs[2 * k] != WORD(TEXT, s->field_text[ACTION]))
        k++;
    Shape *shape = k < keys ? shape_of(s, pairs, keys) : NULL;
    if (shape == NULL || !shape->is_event)
        return MORE;
    Word value[FIELDS];
    for (int f = 0; f < FIELDS; f++)
        value[f] = shape->field[f] == NO_ID ? WORD(NONE, 0) : pairs[2 * shape->field[f] + 1];
    static const int numbers[] = {ADDRESS, STREAM, SIZE, TIME};
    for (int i = 0; i < 4; i++) /* handles such as the first two may be unsigned; as columns they are the same bits */
        if (TAG(value[numbers[i]]) != INT && TAG(value[numbers[i]]) != NONE && (i > 1 || TAG(value[numbers[i]]) != WIDE))
            return MORE;
    if (TAG(value[ADDRESS]) == INT && NUMBER(value[ADDRESS]) < 0)
        return MORE;
    if (TAG(value[ACTION]) != TEXT || TAG(value[DEVICE_FREE]) == BOOL
        || (TAG(value[POOL]) != PAIR && TAG(value[POOL]) != NONE)
        || (TAG(value[METADATA]) != TEXT && TAG(value[METADATA]) != NONE)
        || (TAG(value[FRAMES]) != NONE
            && (TAG(value[FRAMES]) != BOX || s->boxes.at[INDEX(value[FRAMES])].kind != LIST)))
        return MORE;
    Text *action = &s->texts.at[INDEX(value[ACTION])];
    if (action->action == 0) {
        if (s->n_actions == 255)
            return MORE;
        s->actions[s->n_actions++] = (uint32_t)INDEX(value[ACTION]);
        action->action = (uint8_t)s->n_actions;
    }
    int done = row_room(s);
    if (done != DONE)
        return done;
    size_t at = s->rows++;
    int64_t address = handle(s, value[ADDRESS]);
    if (action->length == 3 && memcmp(s->bytes.at + action->begin, "oom", 3) == 0)
        address = TAG(value[DEVICE_FREE]) == INT && NUMBER(value[DEVICE_FREE]) >= 0 ? NUMBER(value[DEVICE_FREE]) : -1;
    CELL(s, uint8_t, C_ACTION, at) = (uint8_t)(action->action - 1);
    CELL(s, uint8_t, C_FLAGS, at) =
        (uint8_t)((shape->field[TIME] != NO_ID ? HAS_TIME : 0) | (TAG(value[TIME]) == INT ? KNOWS_TIME : 0)
                  | (shape->field[POOL] != NO_ID ? HAS_POOL : 0) | (shape->field[METADATA] != NO_ID ? HAS_METADATA : 0)
                  | (shape->field[CONTEXT] != NO_ID ? HAS_CONTEXT : 0));
    CELL(s, int32_t, C_POOL, at) = TAG(value[POOL]) == PAIR ? (int32_t)INDEX(value[POOL]) : -1;
    CELL(s, int32_t, C_FRAMES, at) = TAG(value[FRAMES]) == BOX ? (int32_t)INDEX(value[FRAMES]) : -1;
    CELL(s, int32_t, C_METADATA, at) = TAG(value[METADATA]) == TEXT ? (int32_t)INDEX(value[METADATA]) : -1;
    CELL(s, int64_t, C_ADDRESS, at) = address;
    CELL(s, int64_t, C_SIZE, at) = TAG(value[SIZE]) == INT ? NUMBER(value[SIZE]) : 0;
    CELL(s, int64_t, C_STREAM, at) = handle(s, value[STREAM]);
    CELL(s, int64_t, C_TIME, at) = TAG(value[TIME]) == INT ? NUMBER(value[TIME]) : 0;
    *row = (uint32_t)at;
    return DONE;
}

/* SETITEMS or SETITEM: the pairs above ``target`` on the stack. */
static int set_items(Scanner *s, size_t target)
{
    const Word *pairs = s->stack.at + target + 1;
    size_t length = s->stack.length - target - 1;
    Word word = s->stack.at[target];
    if (TAG(word) != BOX || length % 2)
        return REFUSED;
    uint32_t index = (uint32_t)INDEX(word);
    if (s->boxes.at[index].kind != DICT)
        return REFUSED; /* a row is finished; anything else is damage */
    for (size_t i = 0; i < length; i += 2)
        if (TAG(pairs[i]) != TEXT && TAG(pairs[i]) != INT)
            return REFUSED;
    int done = MORE;
    uint32_t row;
    if (s->boxes.at[index].first == NO_ID && length >= 4 && length <= 2 * MOST_KEYS)
        done = add_row(s, pairs, length / 2, &row);
    if (done == DONE) {
        s->boxes.at[index].kind = ROW;
        s->boxes.at[index].first = row;
    } else if (done == MORE && length)
        done = extend(s, index, pairs, length);
    else if (done == MORE)
        done = DONE;
    s->stack.length = target + 1;
    return done;
}

static int append(Scanner *s, size_t target)
{
    Word word = s->stack.at[target];
    if (TAG(word) != BOX || s->boxes.at[INDEX(word)].kind != LIST)
        return REFUSED;
    size_t length = s->stack.length - target - 1;
    int done = length ? extend(s, (uint32_t)INDEX(word), s->stack.at + target + 1, length) : DONE;
    s->stack.length = target + 1;
    return done;
}

static int push_box(Scanner *s, uint32_t kind)
{
    if (s->boxes.length >= INT32_MAX)
        return REFUSED;
    Box box = {kind, NO_ID, NO_ID};
    PUSH(s->boxes, box);
    PUSH(s->stack, WORD(BOX, s->boxes.length - 1));
    return DONE;
}

static int push_tuple(Scanner *s, size_t length, int pair)
{
    size_t fence = s->marks.length ? s->marks.at[s->marks.length - 1] : 0;
    uint32_t chunk;
    if (s->stack.length < fence + length)
        return REFUSED;
    Word *from = s->stack.at + s->stack.length - length;
    int done;
    if (pair) {
        if ((done = intern_chunk(s, from, 2, &chunk)) != DONE)
            return done;
        if (chunk > INT32_MAX)
            return REFUSED;
        s->stack.length -= 2;
        PUSH(s->stack, WORD(PAIR, chunk));
        return DONE;
    }
    if (++s->odd_tuples > ODD_TUPLES)
        return REFUSED;
    if ((done = add_chunk(s, from, length, 0, &chunk)) != DONE)
        return done;
    s->stack.length -= length;
    if ((done = push_box(s, TUPLE)) == DONE)
        s->boxes.at[s->boxes.length - 1].first = s->boxes.at[s->boxes.length - 1].last = chunk;
    return done;
}

static int put(Scanner *s, uint64_t index)
{
    size_t fence = s->marks.length ? s->marks.at[s->marks.length - 1] : 0;
    if (index != s->memo.length || s->stack.length <= fence)
        return REFUSED;
    PUSH(s->memo, s->stack.at[s->stack.length - 1]);
    return DONE;
}

static int get(Scanner *s, uint64_t index)
{
    if (index >= s->memo.length)
        return REFUSED;
    PUSH(s->stack, s->memo.at[index]);
    return DONE;
}

static uint64_t little(const uint8_t *p, int width)
{
    uint64_t value = 0;
    for (int i = width - 1; i >= 0; i--)
        value = value << 8 | p[i];
    return value;
}

static int push_number(Scanner *s, int64_t value)
{
    if (value >= LARGEST || value < -LARGEST)
        return REFUSED;
    PUSH(s->stack, (Word)((uint64_t)value << 3 | INT));
    return DONE;
}

/* Bytes of an opcode's argument that are always there; -1 where the scanner does not know the opcode. */
static int argument(uint8_t opcode)
{
    switch (opcode) {
    case '}': case ']': case ')': case '(': case 'u': case 'e': case 'a': case 's': case 'N': case 't': case '.':
    case 0x85: case 0x86: case 0x87: case 0x88: case 0x89: case 0x94:
        return 0;
    case 'h': case 'q': case 'K': case 0x8a: case 0x8c:
        return 1;
    case 'M':
        return 2;
    case 'j': case 'r': case 'J': case 'X':
        return 4;
    case 'G': case 0x8d: case 0x95:
        return 8;
    default:
        return -1;
    }
}

#define IS_SMALL(opcode) ((opcode) == 'K' || (opcode) == 'M')

/* Run one opcode with its whole argument at p. */
static int run(Scanner *s, uint8_t opcode, const uint8_t *p, uint64_t length)
{
    uint32_t history = s->history;
    size_t fence = s->marks.length ? s->marks.at[s->marks.length - 1] : 0;
    uint32_t text;
    int done;
    s->history = history << 8 | opcode;
    switch (opcode) {
    case 'h':
        return get(s, *p);
    case 'j':
        return get(s, little(p, 4));
    case 0x94:
        return put(s, s->memo.length);
    case 'q':
        return put(s, *p);
    case 'r':
        return put(s, little(p, 4));
    case 'K':
        return push_number(s, *p);
    case 'M':
        return push_number(s, (int64_t)little(p, 2));
    case 'J':
        return push_number(s, (int32_t)(uint32_t)little(p, 4));
    case 0x8a: {
        uint64_t value = little(p, length < 8 ? (int)length : 8);
        if (length == 9) { /* the ninth byte is the sign's */
            if (p[8] != 0 || !(p[7] & 0x80))
                return REFUSED;
            PUSH(s->wide, value);
            PUSH(s->stack, WORD(WIDE, s->wide.length - 1));
            return DONE;
        }
        if (length && length < 8 && p[length - 1] & 0x80)
            value |= ~(uint64_t)0 << (8 * length);
        return push_number(s, (int64_t)value);
    }
    case 'X': case 0x8c: case 0x8d:
        if ((done = intern_text(s, p, length, &text)) != DONE)
            return done;
        PUSH(s->stack, WORD(TEXT, text));
        return DONE;
    case 'G': {
        uint64_t bits = 0;
        double value;
        for (int i = 0; i < 8; i++)
            bits = bits << 8 | p[i];
        memcpy(&value, &bits, 8);
        PUSH(s->floats, value);
        PUSH(s->stack, WORD(FLOAT, s->floats.length - 1));
        return DONE;
    }
    case 'N':
        PUSH(s->stack, WORD(NONE, 0));
        return DONE;
    case 0x88: case 0x89:
        PUSH(s->stack, WORD(BOOL, opcode == 0x88));
        return DONE;
    case '}':
        return push_box(s, DICT);
    case ']':
        return push_box(s, LIST);
    case ')':
        return push_box(s, TUPLE);
    case '(':
        PUSH(s->marks, s->stack.length);
        return DONE;
    case 0x85: case 0x87:
        return push_tuple(s, opcode - 0x84u, 0);
    case 0x86: /* pairs of small numbers are pools' ids */
        return push_tuple(s, 2, IS_SMALL(history & 255) && IS_SMALL(history >> 8 & 255));
    case 't': /* "(K.K.t": the same in protocol 2 and earlier */
        if (!IS_SMALL(history & 255) || !IS_SMALL(history >> 8 & 255) || (history >> 16 & 255) != '(')
            return REFUSED;
        s->marks.length--;
        return push_tuple(s, 2, 1);
    case 'u': case 'e':
        if (s->marks.length == 0)
            return REFUSED;
        s->marks.length--;
        if (fence == 0 || fence - 1 < (s->marks.length ? s->marks.at[s->marks.length - 1] : 0))
            return REFUSED;
        return opcode == 'u' ? set_items(s, fence - 1) : append(s, fence - 1);
    case 's':
        return s->stack.length < fence + 3 ? REFUSED : set_items(s, s->stack.length - 3);
    case 'a':
        return s->stack.length < fence + 2 ? REFUSED : append(s, s->stack.length - 2);
    default: /* "." */
        s->stopped = 1;
        return s->marks.length || s->stack.length != 1 ? REFUSED : DONE;
    }
}

/* Where an opcode stands among frames. A frame only says how many bytes to fetch at once: DONE: it was one. */
static int frame(Scanner *s, uint8_t opcode, uint64_t at, uint64_t argument)
{
    if (s->framing == FRAMED && at == s->frame_end)
        s->framing = BETWEEN;
    if (opcode == 0x95) {
        if (s->framing != BEGIN && s->framing != BETWEEN)
            return REFUSED;
        if (argument > (uint64_t)1 << 60)
            return REFUSED;
        s->framing = FRAMED;
        s->frame_end = at + 9 + argument;
        return DONE;
    }
    if (s->framing == BEGIN || (s->framing == BETWEEN && opcode != 'X' && opcode != 0x8d))
        s->framing = UNFRAMED;
    return MORE;
}

/* Count "}" and "]": they bound the number of dicts and lists. */
static uint64_t opened(const uint8_t *p, size_t length)
{
    uint64_t found = 0;
    for (size_t i = 0; i < length; i++)
        found += (p[i] & 0xdf) == 0x5d; /* "}" is "]" and one bit more */
    return found;
}

/* Run the references to what was seen before that stand here: most of a large file is lists of them. */
static int references(Scanner *s, const uint8_t **from, const uint8_t *end)
{
    const uint8_t *p = *from;
    if (s->framing == FRAMED) {
        uint64_t left = s->frame_end - (s->seen + (uint64_t)(p - s->input.at));
        if (left < (uint64_t)(end - p))
            end = p + left;
    } else if (s->framing != UNFRAMED)
        return DONE;
    while (end - p > 5 && (*p == 'j' || *p == 'h')) {
        uint64_t index = *p == 'j' ? (uint64_t)p[1] | (uint64_t)p[2] << 8 | (uint64_t)p[3] << 16 | (uint64_t)p[4] << 24
                                   : p[1];
        if (index >= s->memo.length)
            return REFUSED;
        PUSH(s->stack, s->memo.at[index]);
        s->history = s->history << 8 | *p;
        p += *p == 'j' ? 5 : 2;
    }
    *from = p;
    return DONE;
}

/* Run the whole opcodes in the input; keep what is left. */
static int scan(Scanner *s)
{
    const uint8_t *p = s->input.at, *end = p + s->input.length;
    int done = DONE;
    if (!s->started) {
        if (end - p < 2)
            return MORE;
        if (p[0] != 0x80 || p[1] < 2 || p[1] > 5)
            return REFUSED;
        s->started = 1;
        p += 2;
    }
    while (p < end) {
        if (s->stopped) { /* bytes behind the end are not read; those that could be framed are left to Python */
            if (s->stopped == 1 && (*p == 0x95 || *p == 'X' || *p == 0x8d || *p == 0x80))
                return REFUSED; /* 0x80: another pickle */
            s->stopped = 2;
            p = end;
            break;
        }
        if ((done = references(s, &p, end)) != DONE)
            return done;
        uint8_t opcode = *p;
        int fixed = argument(opcode);
        if (fixed < 0)
            return REFUSED;
        if (end - p < 1 + fixed)
            break;
        uint64_t at = s->seen + (uint64_t)(p - s->input.at), length = 0;
        const uint8_t *body = p + 1;
        if (opcode == 0x8c || opcode == 0x8a || opcode == 'X' || opcode == 0x8d) {
            length = little(p + 1, fixed);
            body += fixed;
            if (length > (uint64_t)1 << 40 || (opcode == 0x8a && length > 9))
                return REFUSED;
            if ((uint64_t)(end - p) < 1 + (uint64_t)fixed + length)
                break;
        }
        done = frame(s, opcode, at, opcode == 0x95 ? little(p + 1, 8) : 0);
        if (done == REFUSED)
            return REFUSED;
        uint64_t size = 1 + (uint64_t)fixed + length;
        if (done == MORE) {
            if (s->framing == FRAMED && at + size > s->frame_end)
                return REFUSED; /* it straddles the frame's end */
            if (opcode == '.' && s->framing == FRAMED && at + size != s->frame_end)
                return REFUSED;
            if ((done = run(s, opcode, body, length)) != DONE)
                return done;
        } else { /* a frame's header is not counted */
            s->opened -= opened(p, size);
            s->counted -= size;
        }
        p += size;
    }
    size_t used = (size_t)(p - s->input.at);
    s->opened += opened(s->input.at, used);
    s->counted += used;
    s->seen += used;
    s->input.length -= used;
    if (s->input.length && used)
        memmove(s->input.at, p, s->input.length);
    /* The whole file is held to a tenth of its bytes (memprof.snapshot.opcodes); until then, to what cannot be one. */
    return s->opened > s->counted / 4 + 65536 ? REFUSED : DONE;
}

static PyObject *feed(Scanner *s, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int done = s->refused ? REFUSED : DONE;
    if (done == DONE && !GROW(s->input, (size_t)view.len))
        done = NO_MEMORY;
    if (done == DONE && view.len) {
        memcpy(s->input.at + s->input.length, view.buf, (size_t)view.len);
        s->input.length += (size_t)view.len;
        done = scan(s);
    }
    PyBuffer_Release(&view);
    if (done == NO_MEMORY || done == REFUSED)
        s->refused = 1;
    if (done == NO_MEMORY)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    return PyBool_FromLong(done != REFUSED);
}

/* ------------------------------------------------------------------ what is no event, as Python objects */

static PyObject *build(Scanner *s, Word word, int depth);

static PyObject *text_object(Scanner *s, size_t index)
{
    Text *text = &s->texts.at[index];
    if (text->made == NULL) {
        const char *begin = text->length ? (const char *)s->bytes.at + text->begin : "";
        text->made = PyUnicode_DecodeUTF8(begin, (Py_ssize_t)text->length, "surrogatepass");
    }
    return Py_XNewRef(text->made);
}

static PyObject *tuple_object(Scanner *s, const Chunk *chunk, int depth)
{
    PyObject *tuple = PyTuple_New(chunk->length);
    for (uint32_t i = 0; tuple != NULL && i < chunk->length; i++) {
        PyObject *value = build(s, s->words.at[chunk->begin + i], depth);
        if (value == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

static int fill(Scanner *s, PyObject *object, uint32_t first, int depth)
{
    for (uint32_t c = first; c != NO_ID; c = s->chunks.at[c].next) {
        Chunk chunk = s->chunks.at[c];
        uint32_t step = PyDict_CheckExact(object) ? 2 : 1;
        for (uint32_t i = 0; i < chunk.length; i += step) {
            PyObject *item = build(s, s->words.at[chunk.begin + i], depth), *value = NULL;
            if (item != NULL && step == 2)
                value = build(s, s->words.at[chunk.begin + i + 1], depth);
            int failed = item == NULL || (step == 2 && value == NULL);
            if (!failed)
                failed = step == 2 ? PyDict_SetItem(object, item, value) : PyList_Append(object, item);
            Py_XDECREF(item);
            Py_XDECREF(value);
            if (failed)
                return -1;
        }
    }
    return 0;
}

/* Return the object of a word. Without an exception, NULL says that the scanner gives up. */
static PyObject *build(Scanner *s, Word word, int depth)
{
    if (depth > MOST_DEPTH)
        return NULL;
    size_t index = INDEX(word);
    PyObject *object = NULL;
    switch (TAG(word)) {
    case NONE:
        Py_RETURN_NONE;
    case BOOL:
        return PyBool_FromLong((long)index);
    case INT:
        return PyLong_FromLongLong(NUMBER(word));
    case TEXT:
        return text_object(s, index);
    case FLOAT:
        return PyFloat_FromDouble(s->floats.at[index]);
    case WIDE:
        return PyLong_FromUnsignedLongLong(s->wide.at[index]);
    case PAIR:
        if (s->built_pairs[index] == NULL)
            s->built_pairs[index] = tuple_object(s, &s->chunks.at[index], depth + 1);
        return Py_XNewRef(s->built_pairs[index]);
    default:
        break;
    }
    if (s->built[index] != NULL)
        return Py_NewRef(s->built[index]);
    Box box = s->boxes.at[index];
    if (box.kind == ROW)
        return NULL; /* an event where none belongs */
    if (box.kind == TUPLE) {
        Chunk none = {0, 0, 0, NO_ID};
        object = tuple_object(s, box.first == NO_ID ? &none : &s->chunks.at[box.first], depth + 1);
        if (object != NULL && s->built[index] == NULL)
            s->built[index] = Py_NewRef(object);
        return object;
    }
    object = box.kind == LIST ? PyList_New(0) : PyDict_New();
    if (object == NULL)
        return NULL;
    s->built[index] = Py_NewRef(object); /* first of all: it may hold itself */
    if (fill(s, object, box.first, depth + 1) < 0)
        Py_CLEAR(object);
    return object;
}

/* Return a device's trace as the range of its rows; NULL where it is not rows in the order they were made in. */
static PyObject *rows_object(Scanner *s, Word word)
{
    if (TAG(word) != BOX || s->boxes.at[INDEX(word)].kind != LIST)
        return NULL;
    uint32_t begin = 0, end = 0;
    for (uint32_t c = s->boxes.at[INDEX(word)].first; c != NO_ID; c = s->chunks.at[c].next)
        for (uint32_t i = 0; i < s->chunks.at[c].length; i++) {
            Word entry = s->words.at[s->chunks.at[c].begin + i];
            if (TAG(entry) != BOX || s->boxes.at[INDEX(entry)].kind != ROW)
                return NULL;
            uint32_t row = s->boxes.at[INDEX(entry)].first;
            if (begin == end)
                begin = end = row;
            if (row != end)
                return NULL;
            end++;
        }
    return Py_BuildValue("(II)", begin, end);
}

static PyObject *traces_object(Scanner *s, Word word)
{
    if (TAG(word) != BOX || s->boxes.at[INDEX(word)].kind != LIST)
        return NULL;
    PyObject *traces = PyList_New(0);
    for (uint32_t c = s->boxes.at[INDEX(word)].first; traces != NULL && c != NO_ID; c = s->chunks.at[c].next)
        for (uint32_t i = 0; traces != NULL && i < s->chunks.at[c].length; i++) {
            PyObject *rows = rows_object(s, s->words.at[s->chunks.at[c].begin + i]);
            if (rows == NULL || PyList_Append(traces, rows) < 0)
                Py_CLEAR(traces);
            Py_XDECREF(rows);
        }
    return traces;
}

static PyObject *whole(Scanner *s)
{
    Word top = s->stack.at[0];
    uint32_t name;
    if (TAG(top) != BOX || s->boxes.at[INDEX(top)].kind != DICT
        || intern_text(s, (const uint8_t *)"device_traces", 13, &name) != DONE)
        return NULL;
    PyObject *raw = PyDict_New();
    s->boxes.at[INDEX(top)].kind = ROW; /* so that one that holds itself is given up */
    for (uint32_t c = s->boxes.at[INDEX(top)].first; raw != NULL && c != NO_ID; c = s->chunks.at[c].next)
        for (uint32_t i = 0; raw != NULL && i < s->chunks.at[c].length; i += 2) {
            Word key = s->words.at[s->chunks.at[c].begin + i], word = s->words.at[s->chunks.at[c].begin + i + 1];
            PyObject *text = build(s, key, 0);
            PyObject *value = key == WORD(TEXT, name) ? traces_object(s, word) : build(s, word, 1);
            if (text == NULL || value == NULL || PyDict_SetItem(raw, text, value) < 0)
                Py_CLEAR(raw);
            Py_XDECREF(text);
            Py_XDECREF(value);
        }
    return raw;
}

/* Replace each row's list of frames by its content's chunk; a list in several chunks becomes one first. */
static int resolve_stacks(Scanner *s)
{
    for (size_t row = 0; row < s->rows; row++) {
        int32_t index = CELL(s, int32_t, C_FRAMES, row);
        if (index < 0)
            continue;
        Box *box = &s->boxes.at[index];
        if (box->first != box->last) {
            TABLE(Word) joined = {0};
            for (uint32_t c = box->first; c != NO_ID; c = s->chunks.at[c].next) {
                Chunk *chunk = &s->chunks.at[c];
                if (!GROW(joined, chunk->length)) {
                    free(joined.at);
                    return NO_MEMORY;
                }
                memcpy(joined.at + joined.length, s->words.at + chunk->begin, chunk->length * sizeof(Word));
                joined.length += chunk->length;
            }
            uint32_t chunk = NO_ID;
            int done = intern_chunk(s, joined.at, joined.length, &chunk);
            free(joined.at);
            if (done != DONE)
                return done;
            box->first = box->last = chunk;
        }
        if (box->first != NO_ID && box->first > INT32_MAX)
            return REFUSED;
        CELL(s, int32_t, C_FRAMES, row) = box->first == NO_ID ? -1 : (int32_t)box->first;
    }
    return DONE;
}

/* Number a column's values in order of appearance, from 0, and return the objects they are; -1 stays. */
static PyObject *renumber(Scanner *s, int column, size_t values)
{
    PyObject *objects = PyList_New(0);
    int32_t *number = malloc((values + 1) * sizeof *number);
    if (number == NULL || objects == NULL) {
        free(number);
        Py_XDECREF(objects);
        return PyErr_NoMemory();
    }
    memset(number, 0xff, (values + 1) * sizeof *number);
    for (size_t row = 0; row < s->rows && objects != NULL; row++) {
        int32_t value = CELL(s, int32_t, column, row);
        if (value < 0)
            continue;
        if (number[value] < 0) {
            PyObject *object = NULL;
            number[value] = (int32_t)PyList_GET_SIZE(objects);
            if (column == C_METADATA)
                object = text_object(s, (size_t)value);
            else if (column == C_POOL)
                object = build(s, WORD(PAIR, value), 0);
            else if ((object = PyList_New(0)) != NULL && fill(s, object, (uint32_t)value, 1) < 0)
                Py_CLEAR(object);
            if (object == NULL || PyList_Append(objects, object) < 0)
                Py_CLEAR(objects);
            Py_XDECREF(object);
        }
        CELL(s, int32_t, column, row) = number[value];
    }
    free(number);
    return objects;
}

static PyObject *columns_object(Scanner *s)
{
    PyObject *found = PyDict_New(), *actions = PyList_New(0);
    for (int i = 0; actions != NULL && i < s->n_actions; i++) {
        PyObject *name = text_object(s, s->actions[i]);
        if (name == NULL || PyList_Append(actions, name) < 0)
            Py_CLEAR(actions);
        Py_XDECREF(name);
    }
    PyObject *pools = actions ? renumber(s, C_POOL, s->chunks.length) : NULL;
    PyObject *texts = pools ? renumber(s, C_METADATA, s->texts.length) : NULL;
    PyObject *stacks = texts ? renumber(s, C_FRAMES, s->chunks.length) : NULL;
    int failed = found == NULL || stacks == NULL || row_room(s) != DONE
                 || PyDict_SetItemString(found, "actions", actions) < 0
                 || PyDict_SetItemString(found, "pools", pools) < 0
                 || PyDict_SetItemString(found, "texts", texts) < 0
                 || PyDict_SetItemString(found, "stacks", stacks) < 0;
    for (int c = 0; c < COLUMNS && !failed; c++) {
        failed = _PyBytes_Resize(&s->column[c], (Py_ssize_t)(s->rows * COLUMN_WIDTHS[c])) < 0
                 || PyDict_SetItemString(found, COLUMN_NAMES[c], s->column[c]) < 0;
        Py_CLEAR(s->column[c]);
    }
    s->row_room = s->rows = 0;
    Py_XDECREF(actions);
    Py_XDECREF(pools);
    Py_XDECREF(texts);
    Py_XDECREF(stacks);
    if (failed)
        Py_CLEAR(found);
    return found;
}

#define DROP(table) (free((table).at), (table).at = NULL, (table).length = (table).room = 0)

static PyObject *finish(Scanner *s, PyObject *Py_UNUSED(none))
{
    if (s->refused || !s->stopped || s->input.length || s->opened > s->counted / 10 + 4096)
        Py_RETURN_NONE;
    s->refused = 1; /* once only */
    DROP(s->input);
    DROP(s->memo);
    int done = resolve_stacks(s);
    PyObject *raw = NULL, *columns = NULL, *both = NULL;
    size_t boxes = s->boxes.length, chunks = s->chunks.length;
    if (done == DONE) {
        s->built = calloc(boxes + 1, sizeof *s->built);
        s->built_pairs = calloc(chunks + 1, sizeof *s->built_pairs);
        done = s->built && s->built_pairs ? DONE : NO_MEMORY;
    }
    if (done == DONE && (raw = whole(s)) != NULL && (columns = columns_object(s)) != NULL)
        both = PyTuple_Pack(2, raw, columns);
    Py_XDECREF(raw);
    Py_XDECREF(columns);
    for (size_t i = 0; s->built && i < boxes; i++)
        Py_XDECREF(s->built[i]);
    for (size_t i = 0; s->built_pairs && i < chunks; i++)
        Py_XDECREF(s->built_pairs[i]);
    free(s->built);
    free(s->built_pairs);
    s->built = s->built_pairs = NULL;
    if (both == NULL && done == NO_MEMORY && !PyErr_Occurred())
        return PyErr_NoMemory();
    if (both == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return both;
}

/* ------------------------------------------------------------------ the type and the module */

static void drop(Scanner *s)
{
    for (size_t i = 0; i < s->texts.length; i++)
        Py_XDECREF(s->texts.at[i].made);
    for (int c = 0; c < COLUMNS; c++)
        Py_XDECREF(s->column[c]);
    DROP(s->input);
    DROP(s->stack);
    DROP(s->marks);
    DROP(s->memo);
    DROP(s->words);
    DROP(s->boxes);
    DROP(s->chunks);
    DROP(s->chunk_slots);
    DROP(s->texts);
    DROP(s->bytes);
    DROP(s->text_slots);
    DROP(s->floats);
    DROP(s->wide);
    PyTypeObject *type = Py_TYPE(s);
    type->tp_free((PyObject *)s);
    Py_DECREF(type);
}

static PyObject *create(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(names))
{
    Scanner *s = (Scanner *)type->tp_alloc(type, 0); /* all zero */
    if (s == NULL)
        return NULL;
    for (int f = 0; f < FIELDS; f++)
        if (intern_text(s, (const uint8_t *)FIELD_NAMES[f], strlen(FIELD_NAMES[f]), &s->field_text[f]) != DONE) {
            Py_DECREF(s);
            return PyErr_NoMemory();
        }
    return (PyObject *)s;
}

static PyMethodDef methods[] = {
    {"feed", (PyCFunction)feed, METH_O, "Scan the next bytes of the pickle; return whether the scanner goes on."},
    {"finish", (PyCFunction)finish, METH_NOARGS, "Return (snapshot, columns of its events); None where it gave up."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Scan the pickle of a memory snapshot into columns."},
    {Py_tp_methods, methods},
    {Py_tp_new, (void *)create},
    {Py_tp_dealloc, (void *)drop},
    {0, NULL}};

static PyType_Spec spec = {"memprof._native.scan.Scanner", sizeof(Scanner), 0, Py_TPFLAGS_DEFAULT, slots};

static int start(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Scanner", type);
    Py_DECREF(type);
    return failed < 0 ? -1 : PyModule_AddIntConstant(module, "VERSION", 3);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "scan", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_scan(void)
{
    return PyModuleDef_Init(&definition);
}
