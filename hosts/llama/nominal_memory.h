// The 16-bit memory llama.cpp allocated for its cache. While OSCAR serves the cache nothing is stored in it, and its pages
// stay out of memory.
#pragma once

#include <cstddef>

namespace oscar::llama {

std::size_t resident_bytes(const void* base, std::size_t size);  // mincore
void release_pages(void* base, std::size_t size);  // whole pages inside the range go back to the system; they read as zero then
void zero_fill(void* base, std::size_t size);      // the same for every byte, at the cost of touching two partial pages at most

}  // namespace oscar::llama
