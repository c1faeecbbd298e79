// Tile registers of Intel AMX: eight matrices of up to 16 rows of 64 bytes.
//
// A product adds A times B to float32 sums. Rows of A are bfloat16. B has a row for each pair of
// rows of the factor: B[i][2 * n + j] is element [2 * i + j][n].
//
// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

#include "products.h"

PK_BEGIN_ISA

#ifdef PK_HAS_TILES

constexpr int kTiles = 8;
constexpr int kMostTileRows = 16;   // also the columns of sums
constexpr int kTileDepth = 32;      // the most values of the reduction per product
constexpr int64_t kTileBytes = 64;  // bytes of a row

// Rows and bytes of a row of each tile register.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t rows_of_tile, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(rows_of_tile);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

#ifdef PK_EMULATED

// The tile registers of a thread.
struct TileRegisters {
  bool are_configured = false;
  TileShapes shapes;
  char values[kTiles][kMostTileRows][kTileBytes];
};
inline TileRegisters& tile_registers() {
  thread_local TileRegisters registers;
  return registers;
}

// Ends the process where the processor would raise an exception.
PK_INLINE void check_tiles(bool are_valid) {
  if (!are_valid) __builtin_trap();
}
template <int kTile>
PK_INLINE bool is_usable() {
  return tile_registers().are_configured && tile_registers().shapes.rows[kTile] > 0;
}

PK_INLINE void configure_tiles(const TileShapes& shapes) {
  TileRegisters& tiles = tile_registers();
  check_tiles(!tiles.are_configured && shapes.palette == 1 && shapes.start_row == 0);
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = shapes.rows[tile], bytes = shapes.row_bytes[tile];
    check_tiles(rows <= kMostTileRows && bytes <= kTileBytes && bytes % 4 == 0);
    check_tiles((rows == 0) == (bytes == 0) && (rows == 0 || tile < kTiles));
  }
  tiles.are_configured = true;
  tiles.shapes = shapes;
  std::memset(tiles.values, 0, sizeof tiles.values);
}
PK_INLINE void release_tiles() {
  check_tiles(tile_registers().are_configured);
  tile_registers().are_configured = false;
}

template <int kTile>
PK_INLINE void clear_tile() {
  check_tiles(is_usable<kTile>());
  std::memset(tile_registers().values[kTile], 0, sizeof tile_registers().values[kTile]);
}

template <int kTile>
PK_OUTLINE void load_tile(const void* from, int64_t step) {
  TileRegisters& tiles = tile_registers();
  clear_tile<kTile>();
  for (int i = 0; i < tiles.shapes.rows[kTile]; ++i) {
    const char* row = static_cast<const char*>(from) + i * step;
    std::memcpy(tiles.values[kTile][i], row, tiles.shapes.row_bytes[kTile]);
  }
}

template <int kTile>
PK_OUTLINE void store_tile(void* to, int64_t step) {
  check_tiles(is_usable<kTile>());
  const TileRegisters& tiles = tile_registers();
  for (int i = 0; i < tiles.shapes.rows[kTile]; ++i) {
    char* row = static_cast<char*>(to) + i * step;
    std::memcpy(row, tiles.values[kTile][i], tiles.shapes.row_bytes[kTile]);
  }
}

template <int kSums, int kA, int kB>
PK_OUTLINE void add_tile_product() {
  static_assert(kSums != kA && kA != kB && kSums != kB);
  TileRegisters& tiles = tile_registers();
  const TileShapes& shapes = tiles.shapes;
  // The instruction raises #UD otherwise.
  const bool fit = shapes.rows[kA] == shapes.rows[kSums] && shapes.rows[kSums] > 0 &&
                   shapes.row_bytes[kB] == shapes.row_bytes[kSums] &&
                   shapes.row_bytes[kA] == 4 * shapes.rows[kB];
  check_tiles(fit && is_usable<kA>() && is_usable<kB>());
  for (int m = 0; m < shapes.rows[kSums]; ++m) {
    FullBits sums;
    std::memcpy(&sums, tiles.values[kSums][m], sizeof sums);
    Vector<float> acc = reinterpret_cast<Vector<float>>(sums);
    for (int i = 0; i < shapes.row_bytes[kA] / 4; ++i) {
      FullBits b;
      std::memcpy(&b, tiles.values[kB][i], sizeof b);
      const char* pair = tiles.values[kA][m] + 4 * i;
      acc = multiply_add(acc, load_narrow(reinterpret_cast<const BFloat16*>(pair)), b);
    }
    std::memcpy(tiles.values[kSums][m], &acc, sizeof acc);
  }
}

#else

PK_INLINE void configure_tiles(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}
PK_INLINE void release_tiles() { asm volatile("tilerelease" : :); }

template <int kTile>
PK_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "n"(kTile));
}

template <int kTile>
PK_INLINE void load_tile(const void* from, int64_t step) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(step), "n"(kTile) : "memory");
}

template <int kTile>
PK_INLINE void store_tile(void* to, int64_t step) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(step), "n"(kTile) : "memory");
}

// AT&T syntax: the operands are in reverse order.
template <int kSums, int kA, int kB>
PK_INLINE void add_tile_product() {
  static_assert(kSums != kA && kA != kB && kSums != kB);
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kSums), "n"(kA), "n"(kB));
}

#endif

// Configures the tile registers during its lifetime. Released registers cost nothing when threads
// are switched.
struct ConfiguredTiles {
  PK_INLINE explicit ConfiguredTiles(const TileShapes& shapes) { configure_tiles(shapes); }
  PK_INLINE ~ConfiguredTiles() { release_tiles(); }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
};

// Calls body(constant) for 0, 1, ..., kCount - 1.
template <class Body, int... kIndex>
PK_INLINE void unrolled(const Body& body, std::integer_sequence<int, kIndex...>) {
  (body(std::integral_constant<int, kIndex>{}), ...);
}
template <int kCount, class Body>
PK_INLINE void unrolled(const Body& body) {
  unrolled(body, std::make_integer_sequence<int, kCount>{});
}

// Registers 0 to 3 hold kA by kB tiles of sums, 4 and 5 factors A, 6 and 7 factors B.
constexpr int kSumTiles = 4, kFirstA = 4, kFirstB = 6;

// sums[g][v] += A[g] * B[v] for a step of the reduction. Factors alternate between their two
// registers, or all use register `kRegister` if that is 0 or 1. Each B reverses the order of A: the
// last A stays loaded.
template <int kA, int kB, int kRegister>
PK_INLINE void add_tile_products(const BFloat16* const (&a)[kA], int64_t a_step,
                                 const BFloat16* const (&b)[kB], int64_t b_step) {
  static_assert(kA * kB <= kSumTiles);
  constexpr bool kInTurn = kRegister < 0, kKeepsAll = kA <= (kInTurn ? 2 : 1);
  unrolled<kB>([&](auto v) PK_LAMBDA {
    constexpr int kV = decltype(v)::value;
    constexpr int kRegisterB = kFirstB + (kInTurn ? kV % 2 : kRegister);
    load_tile<kRegisterB>(b[kV], b_step);
    unrolled<kA>([&](auto turn) PK_LAMBDA {
      constexpr int kTurn = decltype(turn)::value, kG = kV % 2 == 0 ? kTurn : kA - 1 - kTurn;
      constexpr int kRegisterA = kFirstA + (kInTurn ? kG % 2 : kRegister);
      constexpr bool kIsLoaded = kV > 0 && (kKeepsAll || kTurn == 0);
      if constexpr (!kIsLoaded) load_tile<kRegisterA>(a[kG], a_step);
      add_tile_product<kG * kB + kV, kRegisterA, kRegisterB>();
    });
  });
}

#endif

PK_END_ISA
