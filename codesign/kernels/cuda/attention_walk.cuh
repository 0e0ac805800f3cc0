// Which tiles of keys a block attends, and in which order: by class, then by column, each in order of position.
// Plain numbers: C columns, SPAN tiles of a class at a time, CLASSES.
#include "attention_work.cuh"

// Of a column and class, tile j.
__device__ __forceinline__ int tile_of(int kind, int column, int j) {
  constexpr int PER_SPAN = SPAN / C;
  return kind * SPAN + column + (u32)j / PER_SPAN * (CLASSES * SPAN) + (u32)j % PER_SPAN * C;
}
// How many of them lie below `end`.
__device__ __forceinline__ int tiles_below(int end, int kind, int column) {
  const int from = end - kind * SPAN;
  if (from <= column) return 0;
  const int in_span = min((u32)from % (CLASSES * SPAN), (u32)SPAN);
  return (u32)from / (CLASSES * SPAN) * (SPAN / C) + (u32)(in_span - column + C - 1) / C;
}

// Of them, those in front of the tail: of all columns and classes of the block.
struct Place {
  int tile, left, kind, column;  // left: with this one, of its column and class; 0: there are no more
};
struct Walk {
  int num_shared, num_classes, member, team_blocks, share, shares;  // num_shared: tiles in front of the tail
  __device__ __forceinline__ Place begin() const {
    Place at = {share * SPAN + member, tiles_below(num_shared, share, member), share, member};
    if (at.left == 0) leave(at);
    return at;
  }
  __device__ __forceinline__ void advance(Place& at) const {
    at.tile += C;
    if ((u32)at.tile % SPAN < C) at.tile += (CLASSES - 1) * SPAN;  // behind a span comes the class's next
    if (--at.left == 0) leave(at);
  }
  __device__ __forceinline__ void leave(Place& at) const {  // a column without tiles left
    while (at.left == 0) {
      at.column += team_blocks;
      if (at.column >= C) at.column = member, at.kind += shares;
      if (at.kind >= num_classes) return;
      at.tile = at.kind * SPAN + at.column, at.left = tiles_below(num_shared, at.kind, at.column);
    }
  }
};
