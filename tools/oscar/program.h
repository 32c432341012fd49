// What can be known about another program before it is started: whether a plug-in can reach into it at all.
#pragma once

#include <filesystem>
#include <string>

namespace oscar::cli {

struct ProgramFacts {
  std::filesystem::path path;
  bool elf = false;           // else a script: its interpreter decides
  bool static_elf = false;    // no dynamic loader: neither LD_PRELOAD nor GGML_BACKEND_PATH can work
  bool loads_ggml = false;    // libggml*.so is among the shared libraries the loader would map
  bool carries_ggml = false;  // ggml is compiled into the program itself
};

// Looks `name` up in PATH as execvp would. Error when there is no such program.
std::filesystem::path find_program(const std::string& name);
ProgramFacts examine(const std::filesystem::path& path);

}  // namespace oscar::cli
