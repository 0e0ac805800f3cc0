// Attention of tree rows over slabs in one launch: queries and new keys rotated, new keys and values
// written to the slabs, keys split over the blocks of a cluster, their results joined.
//
// A row at position p sees p + 1 slab rows, in order of position: rows [0, prefix), then
// prefix + path. Positions are cut into blocks of 16; block i belongs to warp i % KW, to column
// i / KW % C, and to class i / (KW * SPAN) % CLASSES. A warp adds up its blocks of one column and class in
// order; then come the warps, the columns, the classes, each in one order. So what a row adds up depends
// on its own path alone: a row of a tree gives the bits of plain decoding.
//
// A cluster's blocks are one team, a column each, as long as every item has a cluster. Of more items
// than clusters each takes several side by side: its blocks are cut into teams, down to one block, and
// a block takes the columns of its team in turn. So do those of clusters of fewer than C blocks. The
// longest items come first: as many clusters as can be spared have half the teams, of twice the blocks,
// for them; and where teams take several items in turn, those of the longest take the shortest.
//
// Clusters that have no other rows to attend take shares of a context: of n shares, number i takes
// the classes i, i + n, ... Their results meet in `space`, and the last one there joins them. Nobody
// waits for anybody, and the order of additions is the same for every n. A context of one span is one class.
//
// Blocks below every row's prefix are read once for all rows ("shared"). The slab rows behind them
// ("tail": the rest of the prefix, the tree, the new rows) lie in shared memory as a whole, and each
// token gathers its path from there by the row addresses of ldmatrix.
//
// Rows of `padding_slot` fill up the forward behind all others: nothing is attended or written for
// them, their results are zero. How many there are is seen here, as one graph serves all numbers.
//
// The kernel has five numbered parts. What finds work is in attention_work.cuh, what computes in
// attention_tiles.cuh, what joins results in attention_join.cuh. Registers are full: look at what ptxas
// makes of every change here.
#include "attention_join.cuh"
#include "attention_tiles.cuh"
#include "attention_work.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fused_attention(const u16* qkv, const float* cos, const float* sin, const __grid_constant__ Slabs slabs,
               const __grid_constant__ Rows rows, const __grid_constant__ Space space, int most_shares, u16* out, float scale) {
  extern __shared__ __align__(128) u16 memory[];
  __shared__ int numbers[4][MAX_TOKENS];  // of the rows: slots, positions, prefixes, places
  __shared__ int turns[MAX_TOKENS];       // of more than 32 rows: where the items start that this block's team takes, in turn; -1: none
  __shared__ u32 bits[2][WARPS];          // of rows that begin a run, an item
  __shared__ __align__(16) float tops[ROWS][KW], sums[ROWS][KW];
  __shared__ float2 joined_scores[C][OWNED];  // top, sum
  __shared__ bool is_last;
  __shared__ u64 sent_bytes;  // counted: of the results sent to this block
  u16* ring = memory;                                   // STAGES stages
  u16* tail = ring + STAGES * STAGE;                    // TAIL keys, then TAIL values
  u16* queries = tail + 2 * TAIL * LD;                  // ROWS rows
  float* joined = (float*)(queries + ROWS * LD);        // (C, OWNED, E): results for this block's rows; or (KW, 8, E): of its warps
  int* paths = (int*)(joined + ROWS * E);               // (tokens, path_length)
  float* results = (float*)memory;                      // (WARPS * 16, OLD), over the first stages at the end

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wm = warp % MT, wk = warp / MT;
  const int rank = blockIdx.x, head = blockIdx.y, blocks = gridDim.x;
  constexpr int group = GROUP, max_tokens = ROWS / group;
  const int row_elements = (slabs.heads + 2 * slabs.kv_heads) * E;
  const u32 barrier = shared_address(&sent_bytes);
  if (tid == 0) barrier_init(barrier, 1), publish_barriers();
  cluster_arrive_relaxed();  // before anything is stored into another block, that block must have started

  // 1. The requests of the forward: runs of rows in one slab; cut into items of max_tokens rows. Up to 32 rows
  // every warp looks at by itself, with room of its own, and waits for nobody. At a width of 64 the block has
  // found them long before qkv ends, and ptxas would then order the loop over keys one row after the other.
  const bool few = E == 128 && rows.num_rows <= 32;
  const int mine = few ? lane : tid, room = few ? 32 * warp : 0;
  int *const slots = numbers[0] + room, *const positions = numbers[1] + room, *const prefixes = numbers[2] + room, *const places = numbers[3] + room;
  u32 *const runs = bits[0] + room / 32, *const starts = bits[1] + room / 32;
  auto meet = [&]() {
    if (few) __syncwarp();
    else __syncthreads();
  };
  bool counts = false;
  if (!few) turns[mine] = -1;
  if (mine < rows.num_rows) {
    slots[mine] = rows.slots[mine], positions[mine] = rows.positions[mine];
    prefixes[mine] = rows.prefixes[mine], places[mine] = rows.places[mine];
    counts = slots[mine] != rows.padding_slot;
  }
  int num_rows;  // padding comes last
  if (few) num_rows = __popc(__ballot_sync(~0u, counts));
  else num_rows = __syncthreads_count(counts);
  if (few) __syncwarp();
  const bool begins = mine < num_rows && (mine == 0 || slots[mine] != slots[mine - 1] || places[mine] != places[mine - 1] + 1);
  const u32 run_bits = __ballot_sync(~0u, begins);
  if (lane == 0) runs[mine / 32] = run_bits;
  meet();
  const bool cut = mine < num_rows && (mine - bit_at_or_below(runs, mine)) % max_tokens == 0;
  const u32 cut_bits = __ballot_sync(~0u, cut);
  if (lane == 0) starts[mine / 32] = cut_bits;
  meet();
  int num_items = __popc(starts[0]);
  for (int w = 1; w < WARPS && !few; w++) num_items += __popc(starts[w]);
  bool previous_done = false;
  auto clear_padding = [&]() {  // each block its part, by 8 elements
    constexpr int PARTS = group * E / 8;
    for (int i = rank * THREADS + tid; i < (rows.num_rows - num_rows) * PARTS; i += blocks * THREADS)
      *(uint4*)(out + ((size_t)(num_rows + i / PARTS) * slabs.heads + head * group) * E + i % PARTS * 8) = make_uint4(0, 0, 0, 0);
  };

  auto write_row = [&](const Item& item, int row, int at, const Part& part) {
    const int token = row / group;
    const float scale_down = part.sum > 0.f ? 1.f / part.sum : 0.f;
    if (row < max_tokens * group && token < item.end - item.start)
      *(u32*)(out + ((size_t)(item.start + token) * slabs.heads + head * group + row % group) * E + at) =
          to_bf16_pair(part.low * scale_down, part.high * scale_down);
  };

  // How the clusters share out the items.
  const int clusters = gridDim.z;
  int teams = 1, team_blocks = blocks, team = 0;  // of a cluster; all are powers of two
  while (team_blocks > 1 && teams * clusters < num_items) teams *= 2, team_blocks /= 2;
  const int most_teams = teams;
  int place = blockIdx.z * teams, at_once = clusters * teams;  // this cluster's first place, and all places
  if (teams > 1) {
    int larger = 0;  // clusters of larger teams
    for (int spare = at_once - num_items; spare >= teams / 2; spare -= teams / 2) larger++;
    at_once -= larger * (teams / 2), place -= min((int)blockIdx.z, larger) * (teams / 2);
    if ((int)blockIdx.z < larger) teams /= 2, team_blocks *= 2;
  }
  for (int i = rank; i >= team_blocks; i -= team_blocks) team++;
  const int member = rank & (team_blocks - 1);
  int shares = 1, share = 0;  // of an item; more only where all have room at once, so that shares and teams are never both several
  for (int n = 2; n <= CLASSES; n++) shares += n <= most_shares && n * num_items <= clusters;
  for (; share + 1 < shares && place >= num_items; place -= num_items) share++;
  int times = 0, left = num_items;  // turns of this cluster: every other time from the last place to the first
  for (; left >= at_once; left -= at_once) times++;
  times += (times % 2 ? at_once - place - teams : place) < left;
  int turn = -1;  // of the item that starts at this thread's row, if this block's team takes it
  const int turn_at = most_teams > 1 ? num_longer(starts, mine, positions, num_rows) : few ? __popc(cut_bits & ~(~0u << lane)) : num_before(starts, mine);
  if (cut) {
    int at = turn_at, time = 0;
    for (; at >= at_once; at -= at_once) time++;
    if ((time % 2 ? at_once - 1 - at : at) == place + team) turn = time;
  }
  if (!few) {
    if (turn >= 0) turns[turn] = mine;
    __syncthreads();
  }
  auto column_slot = [&](int kind, int column) { return (((blockIdx.z * most_teams + team) * slabs.kv_heads + head) * CLASSES + kind) * C + column; };
  auto class_slot = [&](int index, int kind) { return ((gridDim.z * C + index) * slabs.kv_heads + head) * CLASSES + kind; };

  for (int time = 0; time < times; time++) {
    const int start = few ? __ffs(__ballot_sync(~0u, turn == time)) - 1 : turns[time];
    const bool is_idle = start < 0;  // a team without an item, of a cluster whose other teams have one
    Item item;
    if (few) find_item(item, run_bits, cut_bits, max(start, 0), num_rows);
    else find_item(item, runs, starts, max(start, 0), num_rows);
    if (is_idle) item.end = item.start;
    const int tokens = item.end - item.start, used_rows = tokens * group, context = places[item.first], slot = slots[item.first];
    const int slab_end = places[item.last - 1] + 1;
    int least = 0x7fffffff, seen = 0;  // the shortest prefix, and rows that the last token sees
    if (item.start + lane < item.end) least = prefixes[item.start + lane], seen = positions[item.start + lane] + 1;
    least = __reduce_min_sync(~0u, least), seen = __reduce_max_sync(~0u, seen);
    const int tail_start = min(least, context) & ~15;
    const int tail_rows = min(slab_end - tail_start, TAIL);
    const int num_blocks = (seen + 15) / 16, num_tiles = (num_blocks + KW - 1) / KW;
    const int first_tail = tail_start / KEYS;
    const int num_classes = min((num_tiles + SPAN - 1) / SPAN, CLASSES);  // that have keys
    if (share >= num_classes && !is_idle) continue;  // and nobody counts on this cluster
    const bool in_space = num_classes > 1 || team_blocks < C;  // where columns meet; else in shared memory
    const int takers = min(shares, num_classes);
    auto is_mine = [&](int tile) { return takers == 1 || tile / SPAN % CLASSES % shares == share; };
    bool has_tail = false;  // whether one of this block's tiles has tail blocks
    for (int tile = first_tail + ((member - first_tail) & (team_blocks - 1)); tile < num_tiles; tile += team_blocks) has_tail |= is_mine(tile);
    const SlabRows slab(slabs, rows, slot, head);

    const Walk walk = {num_tiles, num_classes, member, team_blocks, share, shares};
    struct Block {  // a gang's of a tile: its first row, -1 if it is not shared, and that row's page
      int row, page;
    };
    auto block_of = [&](const Place& at) {
      Block block = {(at.tile * KW + wk) * 16, 0};
      if (at.kind >= num_classes || block.row >= tail_start) block.row = -1;
      else block.page = slab.page_of(block.row);
      return block;
    };
    auto fetch = [&](const Block& block, int stage) {
      constexpr int PIECES = E / 8, STEP = GANG / PIECES;  // of 16 bytes in a row; rows that a gang copies at once
      if (block.row >= 0) {
        const int first = (wm * 32 + lane) / PIECES, at = (wm * 32 + lane) % PIECES * 8;
        const size_t from = slab.in_page(block.page, block.row) + first * E + at;  // its 16 rows follow one another, in pages, too
        const u16 *keys = slabs.keys + from, *values = slabs.values + from;
        const u32 to = shared_address(ring + stage * STAGE + (wk * 16 + first) * LD + at);
#pragma unroll
        for (int row = 0; row < 16; row += STEP) {
          copy16(to + row * LD * 2, keys + row * E);
          copy16(to + (KEYS + row) * LD * 2, values + row * E);
        }
      }
      commit_copies();
    };
    // 2. Copies under way: the tail's old rows and paths, and the first tiles of keys and values.
    if (has_tail) {
      const int old_rows = min(context - tail_start, tail_rows);
#pragma unroll 1
      for (int i = tid; i < old_rows * (E / 8); i += THREADS) {
        const int row = i / (E / 8), at = i % (E / 8) * 8;
        const size_t from = slab[tail_start + row] + at;
        copy16(shared_address(tail + row * LD + at), slabs.keys + from);
        copy16(shared_address(tail + (TAIL + row) * LD + at), slabs.values + from);
      }
#pragma unroll 1
      for (int i = tid; i < tokens * rows.path_length; i += THREADS)
        copy4(shared_address(paths + i), rows.paths + (size_t)item.start * rows.path_length + i);
    }
    Place now = walk.begin(), ahead = now;
    Block coming = block_of(ahead);  // a tile before it is needed: its page is looked up
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(coming, i), walk.advance(ahead), coming = block_of(ahead);
    if (!previous_done) {
      cluster_wait();  // others have started; behind the rows' loads nobody waits for that
      wait_for_previous();
      release_next();
      previous_done = true;
    }

    // 3. Queries, and the new rows of the tail, rotated.
    constexpr int PARTS = E / 16, QUERY_PARTS = ROWS * PARTS;
    const int new_parts = has_tail ? min(slab_end - context, tail_rows - (context - tail_start)) * PARTS : 0;
    for (int i = tid; i < max(QUERY_PARTS, new_parts); i += THREADS) {
      const int part = i % PARTS, row = i / PARTS, token = row / group, source = item.first + row;
      const bool is_query = i < QUERY_PARTS, is_new = i < new_parts;
      Turn query = {}, key = {};
      uint4 low, high, value0, value1;
      if (is_query && token < tokens) {
        const int from = item.start + token;
        query.load(qkv + (size_t)from * row_elements + (head * group + row % group) * E, cos + (size_t)from * (E / 2),
                   sin + (size_t)from * (E / 2), part);
      }
      if (is_new) {
        const u16* from = qkv + (size_t)source * row_elements + (slabs.heads + head) * E;
        key.load(from, cos + (size_t)source * (E / 2), sin + (size_t)source * (E / 2), part);
        from += slabs.kv_heads * E + part * 16;
        value0 = load_fresh4(from), value1 = load_fresh4(from + 8);
      }
      if (is_query) {
        query.turned(low, high);
        *(uint4*)(queries + row * LD + part * 8) = low;
        *(uint4*)(queries + row * LD + E / 2 + part * 8) = high;
      }
      if (is_new) {
        key.turned(low, high);
        const int to = context - tail_start + row;
        *(uint4*)(tail + to * LD + part * 8) = low;
        *(uint4*)(tail + to * LD + E / 2 + part * 8) = high;
        *(uint4*)(tail + (TAIL + to) * LD + part * 16) = value0;
        *(uint4*)(tail + (TAIL + to) * LD + part * 16 + 8) = value1;
      }
    }
    wait_for_oldest();  // the tail's copies, too
    __syncthreads();

    // 4. Attention of this block's tiles, a column and class after the other.
    const int key_lane = (lane & 7) + (lane >> 4) * 8, key_part = (lane >> 3 & 1) * 8;
    const int value_lane = lane & 15, value_part = (lane >> 4) * 8;
    State st;
    int stage = 0;
    for (int kind = share, column = member; kind < num_classes; column += team_blocks) {
      if (column >= C) {
        column = member - team_blocks, kind += shares;
        continue;
      }
      if (in_space && kind * SPAN + column >= num_tiles) continue;  // without keys
      u32 q[E / 16][4];
#pragma unroll
      for (int k = 0; k < E / 16; k++)
        load_matrices(q[k], shared_address(queries + (wm * 16 + (lane & 15)) * LD + k * 16 + (lane >> 4) * 8));
#pragma unroll
      for (int n = 0; n < E / 8; n++) st.out[n][0] = st.out[n][1] = st.out[n][2] = st.out[n][3] = 0.f;
      st.top[0] = st.top[1] = NONE, st.sum[0] = st.sum[1] = 0.f;
      for (; now.kind == kind && now.column == column; walk.advance(now)) {
        wait_for_oldest();
        meet_gang(wk);  // all have their copies, and have left the stage that is filled next
        fetch(coming, stage == 0 ? STAGES - 1 : stage - 1);
        walk.advance(ahead);
        coming = block_of(ahead);
        const int block = now.tile * KW + wk;
        float s[1][2][4];
        u32 p[1][4];
        if (block * 16 < tail_start) {  // seen by all rows
          const u16* keys = ring + stage * STAGE + wk * 16 * LD;
          score(s, q, {shared_address(keys + key_lane * LD + key_part)});
#pragma unroll
          for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[0][n][i] = __fmul_rn(s[0][n][i], scale);  // never within a fused one: the tail's are not
          weigh(st, s[0], p[0]);
          add_values(st, p, {shared_address(keys + (KEYS + value_lane) * LD + value_part)});
        } else if (block < num_blocks) {
          const TailRows path = {item, rows, tokens, tail_start, tail_rows, positions, prefixes, paths};
          attend_tail(st, q, s, p, tail, path, block, wm, lane, scale);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float sum = st.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = wm * 16 + (lane >> 2) + 8 * r;
        if ((lane & 3) == 0) tops[row][wk] = st.top[r], sums[row][wk] = sum;
      }
      if (!in_space) break;

      leave_in_space(st, space, column_slot(kind, column) * ROWS, joined, tops, sums, used_rows, tid, lane, wm, wk);
    }

    // 5. Results joined, over the blocks of the cluster and the clusters of an item; new rows to the slab.
    auto leave_new_rows = [&]() {  // one block writes the item's own to the slab
      if ((first_tail & (team_blocks - 1)) != member || !is_mine(first_tail)) return;
      const int first = item.start - item.first + context, last = min(min(item.end - item.first + context, tail_start + tail_rows), slab.count);
      int start = tid;
      asm volatile("" : "+r"(start));  // no address is found, and kept in a register, before
#pragma unroll 1
      for (int i = start; i < (last - first) * (E / 8); i += THREADS) {
        const int row = first + i / (E / 8), at = i % (E / 8) * 8;
        const u16* from = tail + (row - tail_start) * LD + at;
        const size_t to = slab[row] + at;
        *(uint4*)(slabs.keys + to) = *(const uint4*)from;
        *(uint4*)(slabs.values + to) = *(const uint4*)(from + TAIL * LD);
      }
    };
    if (in_space) {
      cluster_arrive();
      leave_new_rows();
      if (time == 0 && blockIdx.z == 0) clear_padding();
      cluster_wait();
      const int owned_parts = (used_rows + team_blocks - 1 - member) / team_blocks * (E / 2);
      auto owned_row = [&](int i) { return member + i / (E / 2) * team_blocks; };
      for (int i = tid; i < owned_parts; i += THREADS) {
        const int at = i % (E / 2) * 2, row = owned_row(i);
        Part all = {0.f, 0.f, NONE, 0.f};
        float2 values[C], scores[C];
        auto load_class = [&](int kind) {
#pragma unroll
          for (int c = 0; c < C; c++) {
            const int from = column_slot(kind, c) * ROWS + row;
            values[c] = make_float2(0, 0), scores[c] = make_float2(NONE, 0);
            if (kind * SPAN + c < num_tiles) values[c] = load_fresh_pair(space.values + from * E + at), scores[c] = load_fresh_pair(space.scores + from * 2);
          }
        };
        load_class(share);
        for (int kind = share; kind < num_classes; kind += shares) {
          float2 these_values[C], these_scores[C];
#pragma unroll
          for (int c = 0; c < C; c++) these_values[c] = values[c], these_scores[c] = scores[c];
          if (kind + shares < num_classes) load_class(kind + shares);  // on its way while this one is joined
          const Part part = joined_columns(these_values, these_scores);
          const int to = class_slot(place, kind) * ROWS + row;
          if (takers == 1) all = joined_classes(all, part);
          else *(float2*)(space.values + to * E + at) = make_float2(part.low, part.high);
          if (takers > 1 && at == 0) *(float2*)(space.scores + to * 2) = make_float2(part.top, part.sum);
        }
        if (takers == 1) write_row(item, row, at, all);
      }
      if (takers > 1) {
        __syncthreads();
        if (tid == 0) is_last = arrive_last(space.arrived + (place * slabs.kv_heads + head) * C + rank, takers);
        __syncthreads();
        for (int i = tid; is_last && i < owned_parts; i += THREADS) {
          const int at = i % (E / 2) * 2, row = owned_row(i);
          float2 values[CLASSES], scores[CLASSES];
#pragma unroll
          for (int kind = 0; kind < CLASSES; kind++) {
            const int from = class_slot(place, kind) * ROWS + row;
            values[kind] = make_float2(0, 0), scores[kind] = make_float2(NONE, 0);
            if (kind < num_classes) values[kind] = load_fresh_pair(space.values + from * E + at), scores[kind] = load_fresh_pair(space.scores + from * 2);
          }
          Part all = {0.f, 0.f, NONE, 0.f};
#pragma unroll
          for (int kind = 0; kind < CLASSES; kind++) all = joined_classes(all, {values[kind].x, values[kind].y, scores[kind].x, scores[kind].y});
          write_row(item, row, at, all);
        }
      }
    } else {
      send_columns(st, results, joined, joined_scores, tops, sums, barrier, used_rows, rank, tid, wm, wk);
      const int owned_rows = min(max(used_rows - rank * OWNED, 0), OWNED);
      if (tid == 0 && owned_rows > 0) barrier_expect(barrier, C * owned_rows * (E * 4 + 8));
      leave_new_rows();  // while the others' results are on their way
      if (time == 0 && blockIdx.z == 0) clear_padding();
      if (owned_rows > 0) arrival_wait(barrier);  // its one phase: a block comes here for one item at most
      for (int i = tid; i < owned_rows * (E / 2); i += THREADS) {
        const int place = i / (E / 2), at = i % (E / 2) * 2;
        float2 values[C], scores[C];
#pragma unroll
        for (int c = 0; c < C; c++) values[c] = *(const float2*)(joined + (c * OWNED + place) * E + at), scores[c] = joined_scores[c][place];
        write_row(item, rank * OWNED + place, at, joined_columns(values, scores));
      }
    }
    if (time + 1 < times) {  // others' results of the next item must not meet this one's
      cluster_arrive();
      cluster_wait();
    }
  }
  if (num_items == 0 && blockIdx.z == 0) {  // padding alone; who waits for this kernel counts on the one in front, too
    wait_for_previous();
    clear_padding();
  }
  if (!previous_done) cluster_wait();
}
