// Copies single rows of interleaved formats, for a trimmed head.
#include "tiles.h"

static void copy_lane(uint8_t *to, int64_t r, const uint8_t *from, int64_t o, int64_t lines, int size) {
    for (int64_t i = 0; i < lines; i++) memcpy(to + (i * ROWS + r) * size, from + (i * ROWS + o) * size, size);
}

// Rows at[i] of `to` = rows ids[i] of `from`, both [.., E] in one format.
void copy_rows(int64_t format, int64_t E, uint8_t *to, const int64_t *at, const uint8_t *from, const int64_t *ids, int64_t count) {
    const int bits = KINDS[format].bits, scales = KINDS[format].scales;
    const int64_t size = unit_bytes(bits, scales), units = E / unit_columns(scales);
    const int64_t coded = code_bytes(bits) * (scales >= SUPER ? 8 : 1);
    for (int64_t n = 0; n < count; n++) {
        const int64_t r = at[n] % ROWS, o = ids[n] % ROWS;
        uint8_t *a = to + at[n] / ROWS * units * size;
        const uint8_t *b = from + ids[n] / ROWS * units * size;
        for (int64_t u = 0; u < units; u++, a += size, b += size) {
            copy_lane(a, r, b, o, coded / 64, 4);
            switch (scales) {
            case HALF: copy_lane(a + coded, r, b + coded, o, 1, 2); break;
            case HALF_SHIFT: copy_lane(a + coded, r, b + coded, o, 2, 2); break;
            case FLOAT: copy_lane(a + coded, r, b + coded, o, 1, 4); break;
            case FLOAT_SHIFT: copy_lane(a + coded, r, b + coded, o, 2, 4); break;
            case POWER: copy_lane(a + coded, r, b + coded, o, 1, 1); break;
            case SUPER: copy_lane(a + coded, r, b + coded, o, 16, 1), copy_lane(a + coded + 256, r, b + coded + 256, o, 2, 2); break;
            default: copy_lane(a + coded, r, b + coded, o, 16, 1), copy_lane(a + coded + 256, r, b + coded + 256, o, 1, 2);
            }
        }
    }
}
