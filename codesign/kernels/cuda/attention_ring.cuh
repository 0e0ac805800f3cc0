// How keys and values that all rows of an item see come to shared memory.
#include "attention_walk.cuh"
#include "attention_work.cuh"

constexpr int BOX = 16 * 128;               // bytes: 64 elements of 16 rows, as a tensor map loads them
constexpr int STAGE = 2 * BOX * (E / 64);   // bytes of a gang's part of a tile: 16 keys, then their values
static_assert(STAGES * STAGE >= ROWS * OLD * 4, "a gang's results have room where its keys were");

// What a gang reads comes here, STAGES tiles ahead. The hardware copies; a warp fills a stage again when all warps
// of the gang have left it.
struct Ring {
  u32 stages, loaded, left;  // shared addresses: of the gang's stages; of barriers that count a stage's bytes, and warps that left it
  int stage = 0, phase = 0;  // of the tile that is attended next
  __device__ __forceinline__ Ring(const u16* ring, const u64 (&loaded)[KW][STAGES], const u64 (&left)[KW][STAGES], int gang)
      : stages(shared_address(ring) + gang * STAGES * STAGE), loaded(shared_address(loaded[gang])), left(shared_address(left[gang])) {
    keep(stages), keep(this->loaded), keep(this->left);
  }
  __device__ __forceinline__ void make_barriers(int lane) const {  // by the warp that fills first
    if (lane < STAGES) barrier_init(loaded + lane * 8, 1), barrier_init(left + lane * 8, MT);
    publish_barriers();
    __syncwarp();
  }
  __device__ __forceinline__ void fill(int stage, const TensorMap& key_map, const TensorMap& value_map, int first_row) const {
    if (elected()) {
      const u32 to = stages + stage * STAGE, counted = loaded + stage * 8;
      barrier_expect(counted, STAGE);
      load_rows(to, key_map, first_row, counted), load_rows(to + STAGE / 2, value_map, first_row, counted);
    }
  }
  __device__ __forceinline__ void wait() const { barrier_wait(loaded + stage * 8, phase); }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  // Behind the products of what was read there: an arrival does not wait for reads that are on their way, and orders
  // them before other warps' accesses only, not before the hardware's copies.
  __device__ __forceinline__ void leave(int stage, int lane) const {
    if (lane == 0) barrier_arrive(left + stage * 8);
  }
};

// Where a lane finds elements [16 k, 16 k + 16) of a row, for ldmatrix: in a row of LD elements, or in the boxes
// of a stage, whose parts of 16 bytes change places by row.
struct Padded {
  u32 at;
  __device__ __forceinline__ u32 operator[](int k) const { return at + 32 * k; }
};
struct Boxed {
  u32 at;
  __device__ __forceinline__ Boxed(u32 box, int row, int part) : at(box + row * 128 + ((part ^ (row & 7)) << 4)) {}
  __device__ __forceinline__ Boxed behind(int bytes) const {  // in another stage
    Boxed other = *this;
    other.at += bytes;
    return other;
  }
  __device__ __forceinline__ u32 operator[](int k) const { return (at ^ ((k & 3) << 5)) + k / 4 * BOX; }
};
