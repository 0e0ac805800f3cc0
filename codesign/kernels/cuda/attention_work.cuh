// Sizes of the attention kernel, its arguments, and how a forward's rows become items of work.
//
// Macros: E head size (64, 128), GROUP query heads of a key/value head, MT tiles of 16 query rows a block, C columns, TAIL rows,
// STAGES tiles of keys and values in flight, PAGE rows of a page (a multiple of 16; 0: slabs are whole).
#include "hopper.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, KW = WARPS / MT, KEYS = 16 * KW, ROWS = 16 * MT;
constexpr int LD = E + 8;               // elements of a row in shared memory: no bank conflicts
constexpr int OLD = E + 8;              // floats of a row of a warp's result
constexpr int OWNED = ROWS / C, MAX_TOKENS = 256;
constexpr int STAGE = KEYS * LD * 2;    // elements: keys, then values
constexpr int GANG = 32 * MT;           // threads of the warps that attend the same keys
static_assert(GANG % (E / 8) == 0 && 16 % (GANG / (E / 8)) == 0, "a gang copies whole rows");
constexpr int SPAN = 4096 / KEYS, CLASSES = 8;  // tiles of a span
constexpr int SIDE = E == 64 && GROUP <= 4 ? 4 : 2;  // tokens whose keys are attended side by side
static_assert(C > 1, "with more items than clusters, teams have fewer than C blocks");
static_assert(SPAN % C == 0, "a span is some tiles of every column");
static_assert(KW * 8 <= ROWS, "eight rows of every warp have room where the result of all rows has");
#define NONE __int_as_float(0xff800000)  // minus infinity: no key seen

static_assert(STAGES >= MT && LD == OLD, "a gang's results have room where its keys were");

struct Rows {  // of the forward, on the device, int32; tables: page of each slab's rows
  const int *slots, *positions, *prefixes, *paths, *places, *tables;
  int num_rows, path_length, table_length, padding_slot;
};

struct Slabs {  // of one layer: (slab or page, kv head, row, E)
  u16 *keys, *values;
  int num_rows, heads, kv_heads;
};

// Where results meet: first those of columns, (team of all clusters, kv head, CLASSES, C), then, of shares,
// those of classes, (item, kv head, CLASSES); each ROWS rows. `arrived` counts the shares of
// (item, kv head, rows of a block), and is zero between launches.
struct Space {
  float *values, *scores;  // E a row; top and sum
  u32* arrived;
};

struct SlabRows {  // of one request and head: element of a row's first channel
  size_t slab;
  const int* table;
  int kv_heads, head, count;
  __device__ __forceinline__ SlabRows(const Slabs& slabs, const Rows& rows, int slot, int head) : kv_heads(slabs.kv_heads), head(head) {
    if constexpr (PAGE > 0) table = rows.tables + (size_t)slot * rows.table_length, count = rows.table_length * PAGE;
    else slab = ((size_t)slot * kv_heads + head) * slabs.num_rows * E, count = slabs.num_rows;
  }
  __device__ __forceinline__ int page_of(int row) const {
    if constexpr (PAGE > 0) return table[row / PAGE];
    else return 0;
  }
  __device__ __forceinline__ size_t in_page(int page, int row) const {
    if constexpr (PAGE > 0) return (((size_t)page * kv_heads + head) * PAGE + row % PAGE) * E;
    else return slab + (size_t)row * E;
  }
  __device__ __forceinline__ size_t operator[](int row) const { return in_page(page_of(row), row); }
};

struct Item {  // tokens [start, end) of a request whose rows are [first, last)
  int start, end, first, last;
};

// The last set bit at or below a row: its run's first row. The first set bit above it, or `end`.
__device__ __forceinline__ int bit_at_or_below(const u32* bits, int row) {
  int word = row / 32;
  u32 rest = bits[word] & (~0u >> (31 - row % 32));
  while (rest == 0) rest = bits[--word];  // bit 0 is set
  return word * 32 + 31 - __clz(rest);
}
__device__ __forceinline__ int bit_above(const u32* bits, int row, int end) {
  for (int next = row + 1; next < end;) {
    const u32 rest = bits[next / 32] >> (next % 32);
    if (rest) return min(end, next + __ffs(rest) - 1);
    next = (next / 32 + 1) * 32;
  }
  return end;
}

// How many items start before that one, which starts at a row. How many are longer, or as long and start before it.
__device__ __forceinline__ int num_before(const u32* starts, int row) {
  int before = __popc(starts[row / 32] & ~(~0u << row % 32));
  for (int word = 0; word < row / 32; word++) before += __popc(starts[word]);
  return before;
}
__device__ __forceinline__ int num_longer(const u32* starts, int row, const int* positions, int num_rows) {
  const int position = positions[row];
  int longer = 0;
#pragma unroll 8
  for (int other = 0; other < num_rows; other++) {
    const int theirs = positions[other];
    longer += (starts[other / 32] >> other % 32 & 1) && (theirs > position || (theirs == position && other < row));
  }
  return longer;
}

// The item that starts at a row: `runs` and `starts` have a bit for each row that begins a run, an item.
__device__ __forceinline__ void find_item(Item& item, const u32* runs, const u32* starts, int start, int num_rows) {
  item.start = start, item.end = bit_above(starts, start, num_rows);
  item.first = bit_at_or_below(runs, start), item.last = bit_above(runs, start, num_rows);
}
// The same of up to 32 rows.
__device__ __forceinline__ void find_item(Item& item, u32 runs, u32 starts, int start, int num_rows) {
  const u32 below = ~0u >> (31 - start), next = starts & ~below, later = runs & ~below;
  item.start = start, item.end = next ? __ffs(next) - 1 : num_rows;
  item.first = 31 - __clz(runs & below), item.last = later ? __ffs(later) - 1 : num_rows;
}

__device__ __forceinline__ void meet_gang(int gang) { asm volatile("bar.sync %0, %1;" ::"r"(1 + gang), "n"(GANG) : "memory"); }
__device__ __forceinline__ void wait_for_oldest() { wait_for_copies<STAGES - 2>(); }


// The tiles of one block: by class, then by column, each in order of position.
struct Place {
  int tile, kind, column;
};
struct Walk {
  int num_tiles, num_classes, member, team_blocks, share, shares;
  __device__ __forceinline__ void settle(Place& at) const {
    while (at.kind < num_classes && at.tile >= num_tiles) {
      at.column += team_blocks;
      if (at.column >= C) at.column = member, at.kind += shares;
      at.tile = at.kind * SPAN + at.column;
    }
  }
  __device__ __forceinline__ Place begin() const {
    Place at = {share * SPAN + member, share, member};
    settle(at);
    return at;
  }
  __device__ __forceinline__ void advance(Place& at) const {
    at.tile += C;
    if (at.tile % SPAN < C) at.tile += (CLASSES - 1) * SPAN;  // behind a span comes the class's next
    settle(at);
  }
};
