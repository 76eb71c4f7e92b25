// Includes BODY twice: for float, and for bfloat16, which is read and written while all else is float32. T is the type
// in memory, NAME(x) the name of x for it.

#define T float
#define NAME(x) x##_float
#include BODY
#undef T
#undef NAME
#define T bfloat16
#define NAME(x) x##_bfloat16
#include BODY
#undef T
#undef NAME
#undef BODY
