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

// x rounded to eight bits. A unit here is the columns with one scale (`scale_columns`). It is a tile of rows after another
// (tiles.h), and in a tile the same columns of all rows lie side by side.
typedef struct {
    int8_t *q;        // tiles of [E / 32, rows, 32], or [E / 64, rows, 64] for `squares`
    float *scale;     // tiles of [units, rows]
    float *both;      // units of 32 columns: tiles of [units, rows], scale times the sum of q
    int16_t *sums;    // units of 256 columns: tiles of [units, rows, 8], the sums of q in each 32 columns
    int32_t *less[3]; // of each part of the matrix: tiles of [E / 32, rows, 2], see `offset_of`; units of 256
                      // columns and SIXTEEN have one for each half of a group, the others have one and 0
} eights;

// One scale for 256 columns would leave nothing of most of them where one number is far larger than the others. Such
// numbers stand here instead, with a scale of their own: what is 0 elsewhere is rounded to q.
typedef struct {
    int8_t *q;       // [T, E]; only groups of 32 columns that have such numbers are written
    int16_t *sums;   // [T, E / 16], of q in 16 columns; likewise
    float *scale;    // [T, E / 256]
    uint8_t *groups; // [T, E / 256], a bit for each group that has such numbers
} outliers;

// Rows of x [T, E] in the forms that a matrix needs; a thread's own, or shared.
typedef struct {
    const float *x; // [T, E], `row` floats apart
    int64_t row, T;
    eights small, large; // for units of 32, and of 256 columns
    outliers far;        // of units of 256 columns
    uint16_t *h;  // [T, E], rounded to bfloat16
    float *f;     // [T, E], rounded to bfloat16, stored as float32
} rows;

int64_t scale_columns(int64_t format); // columns of x that have one scale in products with W in this format
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
