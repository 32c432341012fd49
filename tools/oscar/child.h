// Another program's output, read to its end.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace oscar::cli {

struct ChildOutput {
  int code = 0;  // exit code, or 128 + signal
  std::string out, err;
};
// `args` begins with the program's path; `environment` is set for it beside ours. It ends when we do. Error when it cannot
// start.
ChildOutput run_captured(const std::vector<std::string>& args,
                         const std::vector<std::pair<std::string, std::string>>& environment);

}  // namespace oscar::cli
