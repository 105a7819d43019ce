// Products y = x W^T for any number of rows of x, with weights as packed.py lays them out.
#pragma once
#include "team.h"
#include <stdint.h>

// How a run of rows is stored. FLOAT32 and BFLOAT16 are plain [rows, E]. The others interleave 16 rows; the first word
// gives the bits of a number, the rest how scales are stored: HALF and FLOAT are one float16 or float32 for 32 columns,
// without or with a shift (SHIFT). SUPER is a byte each for scale and shift of 32 columns, times a float16 each for 256.
// SIXTEEN is a signed byte for 16 columns, times a float16 for 256. E2M1_POWER is MXFP4: a byte for 32 columns, the
// exponent of a power of two.
enum format {
    FLOAT32,
    BFLOAT16,
    FOUR_HALF,
    FOUR_HALF_SHIFT,
    FOUR_FLOAT_SHIFT,
    FOUR_SUPER,
    FIVE_HALF,
    FIVE_HALF_SHIFT,
    FIVE_SUPER,
    SIX_SIXTEEN,
    EIGHT_HALF,
    EIGHT_HALF_SHIFT,
    EIGHT_FLOAT,
    EIGHT_FLOAT_SHIFT,
    FP8_HALF,
    FP8_FLOAT,
    E2M1_POWER,
    FORMATS
};

enum activations { AS_INT8, AS_BFLOAT16, AS_FLOAT32 };

typedef struct {
    const uint8_t *data;
    int64_t rows, format;
} segment; // a run of rows of a matrix

typedef struct {
    segment parts[3];
    int64_t count, O, E;
    int64_t activations; // the type for quantised parts; bfloat16 parts take bfloat16 unless this is AS_FLOAT32
} matrix;

// Rows of x [T, E] in the forms that a matrix needs; a thread's own, or shared. The 8-bit form is a
// tile of rows after another (tiles.h), and in a tile the rows of a group of 32 columns lie side by side.
typedef struct {
    const float *x; // [T, E], `row` floats apart
    int64_t row, T;
    int8_t *q;    // tiles of [E / 32, rows, 32], rounded to eight bits
    float *scale; // tiles of [E / 32, rows]
    float *both;  // like `scale`: scale times the sum of q
    int32_t *less[3]; // of each part of the matrix: tiles of [E / 32, rows, 2], see `offset_of`; SIXTEEN has one for each
                      // half of a group, the others have one and 0
    uint16_t *h;  // [T, E], rounded to bfloat16
    float *f;     // [T, E], rounded to bfloat16, stored as float32
} rows;

int64_t rows_bytes(int64_t T, int64_t E);                       // memory for `rows_at`
rows rows_at(const float *x, int64_t row, void *memory, int64_t T, int64_t E);
void round_row(const matrix *m, const rows *x, int64_t t);      // fills the forms of row t that m needs
void product(const matrix *m, const rows *x, int64_t T, int64_t first, int64_t count, float *y, int64_t row_y);
void share(const member *me, const matrix *m, const rows *x, int64_t T, float *y, int64_t row_y);
int64_t chunk(int64_t O, int64_t parts);
void ask(const matrix *m, int64_t first); // prefetches where row `first` begins
void restore_row(const matrix *m, int64_t o, float *y); // one row of W in float32
// y[t, r] of R rows of W, `row_w` elements apart, and T rows of x: W of a type times float32, or both bfloat16. Prefetches
// the bytes `ahead` of those of W; 0: as suits rows that follow one another.
enum type { OF_FLOAT32, OF_BFLOAT16, OF_FLOAT16 };
void plain_rows(const uint8_t *w, enum type type, int64_t row_w, const float *x, int64_t row_x, int64_t R, int64_t T,
                int64_t E, float *y, int64_t row_y, int64_t ahead);
void plain_pairs(const uint16_t *w, int64_t row_w, const uint16_t *x, int64_t R, int64_t T, int64_t E, float *y, int64_t row_y,
                 int64_t ahead);
int64_t segment_bytes(int64_t format, int64_t rows, int64_t E);
