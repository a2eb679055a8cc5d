// Numbers, tensor cores and bfloat16, for step.cu and attend.cu.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char byte;

// c += a @ b for a tile of 16 rows, 16 columns and 8 vectors: bfloat16, summed in float32.
__device__ __forceinline__ void tile_product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 two(float low, float high) {  // as bfloat16 in one word
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ float low_of(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_of(u32 word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ float power(float v) {  // of two
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
  return y;
}

// A byte of fp8 (e4m3) is widened by giving its bits their places in a bfloat16, which makes it 2^-120 of what it is. Its
// partner in a product is raised, and their sum restored.
constexpr float RAISED = 0x1p90f, RESTORED = 0x1p30f;

// Bytes 0 and 2, and bytes 1 and 3, of four fp8. NaN, whose lower seven bits are ones, would become a number.
__device__ __forceinline__ u32 even_bytes(u32 word) { return (word << 8 & 0x80008000u) | (word << 4 & 0x07f007f0u); }
__device__ __forceinline__ u32 odd_bytes(u32 word) { return (word & 0x80008000u) | (word >> 4 & 0x07f007f0u); }

// Of four fp8, the highest bits of those that are NaN; the other bits mean nothing.
__device__ __forceinline__ u32 nan_marks(u32 word) { return (word & 0x7f7f7f7fu) + 0x01010101u; }
__device__ __forceinline__ u32 nan_marks(uint4 words) {
  return nan_marks(words.x) | nan_marks(words.y) | nan_marks(words.z) | nan_marks(words.w);
}
constexpr u32 NAN_MARKS = 0x80808080u;
