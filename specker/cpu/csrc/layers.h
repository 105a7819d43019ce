// Whole decoder layers.
#pragma once
#include "communicator.h"
#include "products.h"

enum activation { SILU, GELU_TANH, GELU, CLAMPED_SILU };
enum scoring { SOFTMAX, SIGMOID }; // of a router's logits
enum projects { K_AND_V, K_ALONE, NEITHER }; // besides q: without V's projection V is K's, and NEITHER reads the K/V of another layer

// Of X experts, gate_up [X 2 F, E] and down [X E, F] stand one after another, and so do their biases. An absent vector
// is 0, and an absent matrix has no rows.
typedef struct {
    /* <!-- generated layer_weights --> */
    const float *norm_in; // [E], before attention
    matrix qkv; // [(Hq + 2 Hkv) D, E], rows: the gate's of a gated layer, q's, k's and v's; of a recurrent layer the in-projection
    const float *qkv_bias; // [(Hq + 2 Hkv) D]
    const float *q_norm; // [1, D], or over all heads [1, Hq D]
    const float *k_norm; // [1, D], or over all heads [1, Hkv D]
    const float *sinks; // [1, Hq], logits that add nothing but their share of the softmax
    matrix gates; // [2 Hv, E], rows: b, then a of each value head; absent where qkv ends with them
    const float *conv; // [C, K], in the struct [K, C]
    const float *a_log; // [Hv]
    const float *dt_bias; // [Hv]
    const float *norm_mix; // [Dv]
    matrix o; // [E, Hq D], of a recurrent layer the out-projection
    const float *o_bias; // [E]
    const float *norm_o; // [E], of the output of attention
    const float *norm_post; // [E], before the feed-forward
    matrix gate_up; // [2 F, E], gate rows first
    const float *gate_up_bias; // [2 F]
    matrix down; // [E, F]
    const float *down_bias; // [E]
    const float *norm_down; // [E], of the output of the feed-forward
    matrix router; // [X, E], of a mixture of experts
    const float *router_bias; // [X], see Experts.biased
    matrix shared_gate_up; // [2 S, E], of a mixture's expert that every row reads
    matrix shared_down; // [E, S]
    const float *shared_gate; // [1, E], absent: the shared expert's output is added as it is
    const float *router_norm; // [E], of what the router reads
    const float *router_scale; // [X], factor of each expert's score
    const float *norm_experts; // [E], of what the experts read
    const float *norm_mixed; // [E], of the experts' output
    const float *norm_shared; // [E], of the shared expert's output
    matrix ple_gate; // [P, E]
    matrix ple_out; // [E, P]
    const float *norm_ple; // [E]
    const float *scalar; // [1], factor of the stream at the layer's end
    /* <!-- end --> */
    const float *rope;      // [C, 2, D]
    const float *v_norm;    // [D], of each head of V; 0: absent
    int64_t Hkv, D;         // heads of K and V, and the size of a head; the model's Hkv and D are the largest ones
    int64_t projects;       // enum projects
    int64_t recurrent;      // the layer has a recurrent state; 0: it attends
    int64_t sliding_window; // a row sees the last so many of its columns; 0: all
    int64_t rank;           // the number of earlier layers of its kind: with a sliding window or without, recurrent or not
    int64_t place;          // the number of earlier layers; both count those that have K/V, up to the one that it reads
} layer;

// What layers with a recurrent state compute. The rows of their qkv are, for DELTA, the channels C of q, k and v, then z
// [Hv Dv], b [Hv] and a [Hv] (kernels/delta_rows.py); for CONV b, c and x, each [C]: the output is c conv(b x).
enum mixer { ATTENTION, DELTA, CONV };

typedef struct {
    int64_t kind;           // enum mixer; ATTENTION if no layer has a recurrent state
    int64_t Hk, Hv, Dk, Dv; // of DELTA
    int64_t C, K;           // channels of the convolution, and the columns that it reads
    int64_t block;          // see `delta_rows`
    int64_t tiled;          // the out-projection reads the first value head of each key head, then the second ones, ..
} mixing;

// How a pair, the embedding of a token and a feature, enters the layers of a head that reads a target (model/heads.py).
typedef struct {
    const float *embed_norm, *hidden_norm; // [E]; 0: absent
    const float *fc_bias, *norm_out;       // [E]; 0: absent. norm_out: of the rows that `forward` returns
    const float *final_norm;               // [E], the target's, of features that lack it; 0: absent
    double final_eps;
    const matrix *fc;                      // [E, 2 E], makes the stream of both side by side; 0: the first qkv reads both
    int64_t residual;                      // without fc, the stream is the feature itself; 0: its norm
} entry;

typedef struct {
    int64_t E, Hq, Hkv, D, F; // Hkv, D and F: the largest of all layers
    int64_t heads;            // query heads of a head of K and V, in the layer with the most
    int64_t activation; // of the feed-forward's gate
    int64_t experts;    // X of layers with a router, 0 if there are none
    int64_t chosen;     // experts of each row
    int64_t normalised; // the scores of a row's experts are divided by their sum + score_eps
    int64_t scoring;    // enum scoring
    int64_t shared;     // layers with a router have an expert that every row reads
    int64_t inner;      // numbers that a row has in `state.gate`, in the layer with the most
    int64_t whole;      // the norms of q and k span all their heads: [Hq D] and [Hkv D] instead of [D]
    int64_t gated;      // qkv of a layer that attends begins with the gate [Hq D] of its output
    int64_t projected, mixed; // numbers that a row has in `state.qkv` and `state.mixed`, in the layer with the most
    int64_t positions;        // that every layer's `rope` has
    mixing mix;
    const layer *layers;
    const entry *entry; // 0: the stream begins as `forward.x`
    double eps, scale;  // epsilon of the norms; factor of attention's scores
    double score_scale, score_eps; // factor of the experts' scores, and what is added to their sum
    double cap;                    // soft cap of attention's scores; 0: none
    communicator *ranks;           // that hold the other columns of the feed-forwards; 0: all are here
    communicator *mixing;          // that hold the other heads; 0: all are here
    communicator *beside;          // ranks over which the attention of a group's layers is divided; 0: all is done here
} stack;

// How K and V are kept. INT8 is D codes from -127 to 127, then a float32, their
// scale; K is rotated before (kept.c).
enum kept { KEPT_FLOAT32, KEPT_BFLOAT16, KEPT_FLOAT16, KEPT_INT8 };

typedef struct {          // the K/V of some layers, and where rows and columns stand in it
    const int64_t *slots; // [T]
    const int32_t *table; // [B, pages]
    uint8_t *k, *v;       // [L, pages, page, Hkv, head]
    int64_t stride;       // bytes from a layer to the next
    int64_t head;         // bytes of a head in one column
    int64_t format;       // enum kept
    int64_t count;        // pages of a layer
} pool;

typedef struct {                       // the states and records of layers with a recurrent state
    const int64_t *slots;              // [T]
    const int32_t *table;              // [B, pages]; pages may repeat, as in a ring
    const int64_t *state_of;           // [B], each sequence's states
    float *inputs;                     // [L, count, page, C], of the convolution
    float *k, *u, *g;                  // [L, count, page, Hk, Dk], [.., Hv, Dv], [.., Hv, 4]: kernels/delta_rows.py
    float *states;                     // [L, X, 2, Hv, Dk, Dv]
    int64_t *anchors;                  // [L, X, Hv]
    int64_t count, pages, page, X;
} records;

typedef struct { // T rows of B sequences
    int64_t T, B, W;
    const int64_t *positions;                    // [T]
    const int32_t *cu_rows, *kv_len, *window;    // [B + 1], [B], [B]
    const int64_t *words;                        // [T, W]: kernels/tree_attention.py; 0: see `full`
    int64_t full;                                // without words a row sees its sequence up to itself, or all of it
    int64_t pages, page;                         // pages of a sequence; columns of a page
    pool all, near;                              // near: of the layers with a sliding window, unless they stand in `all`
    records past;                                // without slots if no layer has a recurrent state
} places;

typedef struct {
    const stack *model;
    const places *rows;
    const int64_t *groups; // the first layer of each group, then the end
    int64_t group_count;
    const int64_t *aux_layers; // depths whose residual stream is returned
    int64_t aux_count;
    const float *x, *features; // [T, E]; with an entry x holds the embeddings, else there are no features
    int64_t row;               // numbers from a row of x to the next: E, and with per-layer embeddings L P behind them
    int64_t raw;               // the features lack the target's final norm
    float *out;                // [1 + aux_count, T, E]
    int32_t *routed;           // [mixtures, X + 1], where each expert's choices begin in their order by expert; 0: not kept
} forward;

int forward_fits(const forward *f); // whether all that its rows index lies within its memory; 0: a call must not run it
int columns_fit(const places *p, int64_t b, int64_t columns); // whether sequence b has so many columns
int64_t forward_bytes(const forward *f, int size); // scratch of a team of `size`
void run_forward(const member *m, const forward *f, char *scratch);
void normalise(const float *x, const float *weight, float *y, int64_t E, float eps);
void grow(float *x, const float *delta, const float *bias, int64_t E);
void gated(int64_t activation, float *gate, const float *up, int64_t count);
void soften(float *x, float scale, float cap, int64_t count);   // x = cap tanh(scale x / cap)
void weigh_silu(float *x, int64_t count);                       // x = x sigmoid(x); `count` is a multiple of 16
void weigh_sigmoid(float *x, const float *gate, int64_t count); // x = x sigmoid(gate)
