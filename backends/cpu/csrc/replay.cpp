// A recorded pass: kernels in order, each with its words, by one team of threads.

#include "words.h"

namespace headrace {

struct Entry {
    void (*kernel)(const Word*);
    Word* words;
    int64_t rows;  // which word is the number of rows; -1: none
};

}  // namespace headrace

HR_API void hr_replay(const headrace::Entry* entries, int64_t count, int64_t rows) {
    for (int64_t i = 0; i < count; ++i)
        if (entries[i].rows >= 0) entries[i].words[entries[i].rows].number = rows;
#pragma omp parallel
    for (int64_t i = 0; i < count; ++i) entries[i].kernel(entries[i].words);
}
