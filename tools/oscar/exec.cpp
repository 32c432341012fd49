// `oscar exec -- PROGRAM ARGS`: runs a stock llama.cpp program with the plug-in inside, and checks afterwards that it served.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "cli.h"
#include "oscar/base/error.h"
#include "output.h"
#include "program.h"
#include "settings.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct ExecOptions {
  Settings settings;
  bool no_strict = false;
  std::string stats;
};

// What the program was told that concerns OSCAR, from its arguments or llama.cpp's environment twins.
struct HostArguments {
  std::string model, flash_attention, cache_ram;
  bool only_asks = false;  // --help and the like: ends before any attention
};

[[noreturn]] void refuse_cache_type(const std::string& flag, const std::string& value) {
  fail("{} {} cannot work with OSCAR, which replaces llama.cpp's 16-bit cache: leave the cache type at f16 (drop {})", flag,
       value, flag);
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

HostArguments read_arguments(const std::vector<std::string>& args) {
  HostArguments host{environment("LLAMA_ARG_MODEL"), environment("LLAMA_ARG_FLASH_ATTN"), environment("LLAMA_ARG_CACHE_RAM"),
                     false};
  std::vector<std::pair<std::string, std::string>> cache_types;
  for (const char* name : {"LLAMA_ARG_CACHE_TYPE_K", "LLAMA_ARG_CACHE_TYPE_V"}) {
    if (const std::string value = environment(name); !value.empty()) cache_types.emplace_back(std::string(name), value);
  }
  for (std::size_t i = 1; i < args.size(); ++i) {
    const std::string& arg = args[i];
    const auto is = [&](std::initializer_list<const char*> names) {
      return std::any_of(names.begin(), names.end(), [&](const char* name) { return arg == name; });
    };
    if (is({"-h", "--help", "--usage", "--version", "--list-devices", "--license", "--cache-list", "-cl",
            "--completion-bash"})) {
      host.only_asks = true;
    }
    if (i + 1 == args.size()) break;
    const std::string& value = args[i + 1];
    if (is({"-m", "--model"})) host.model = value;
    if (is({"-fa", "--flash-attn"})) host.flash_attention = value;
    if (is({"-cram", "--cache-ram"})) host.cache_ram = value;
    if (is({"-ctk", "--cache-type-k", "-ctv", "--cache-type-v"})) cache_types.emplace_back(arg, value);
  }
  for (const auto& [flag, value] : cache_types) {
    if (value != "f16") refuse_cache_type(flag, value);
  }
  for (const char* off : {"off", "0", "false", "disabled"}) {
    const std::string& value = host.flash_attention;
    if (value == off || value.find(std::string(off) + ",") == 0 || value.find("," + std::string(off)) != std::string::npos) {
      fail(
          "-fa {} (or LLAMA_ARG_FLASH_ATTN) cannot work with OSCAR, which serves llama.cpp's flash-attention operation: use "
          "-fa on "
          "(or drop it)",
          value);
    }
  }
  return host;
}

void check_program(const ProgramFacts& facts) {
  const std::string name = facts.path.filename().string();
  if (facts.static_elf) {
    fail("{} is a static executable, no plug-in can be loaded into it: build llama.cpp with -DBUILD_SHARED_LIBS=ON", name);
  }
  if (facts.carries_ggml) {
    fail("{} has ggml linked into it statically, the plug-in cannot hook it: build llama.cpp with -DBUILD_SHARED_LIBS=ON",
         name);
  }
}

// --- the child and its signals ---------------------------------------------------------------------------------------

std::atomic<pid_t> child_process{0};

// Whether the program has a process group of its own, so that signals to ours reach only us.
std::atomic<bool> own_group{false};

// The last signal that was passed on, and by whom it was sent. forward() alone uses it, with all its signals blocked.
struct LastSignal {
  int signal = 0;
  pid_t sender = 0;
  std::int64_t when_ms = 0;
};
LastSignal last_signal;
constexpr std::int64_t kSameSignalMs = 200;

// `timeout` sends its signal twice, to its child and to the group. Both reach us, and the program may get one only.
bool repeated(int signal, const siginfo_t* info) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const LastSignal next{signal, info != nullptr ? info->si_pid : 0, now.tv_sec * 1000 + now.tv_nsec / 1000000};
  const bool same = next.signal == last_signal.signal && next.sender == last_signal.sender && next.sender != 0 &&
                    next.when_ms - last_signal.when_ms < kSameSignalMs;
  if (!same) last_signal = next;
  return same;
}

void forward(int signal, siginfo_t* info, void*) {
  // Ctrl-C on a terminal reaches the whole process group: the program has it already.
  if (!own_group && info != nullptr && info->si_code == SI_KERNEL) return;
  const pid_t child = child_process.load();
  if (child <= 0) return;
  // What ends programs is for all that this one has started, as it would be without us.
  const bool ends = signal != SIGUSR1 && signal != SIGUSR2;
  if (ends && repeated(signal, info)) return;
  kill(own_group && ends ? -child : child, signal);
}

constexpr std::array<int, 6> kForwarded{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

int run_child(const fs::path& program, const std::vector<std::string>& args) {
  std::vector<std::string> copy = args;
  std::vector<char*> argv;
  argv.reserve(copy.size() + 1);
  for (std::string& arg : copy) argv.push_back(arg.data());
  argv.push_back(nullptr);
  // The pipe carries execv's error; it closes by itself when execv works.
  std::array<int, 2> report{};
  if (pipe2(report.data(), O_CLOEXEC) != 0) fail("no pipe for {}: {}", program.string(), std::strerror(errno));

  sigset_t blocked, before;
  sigemptyset(&blocked);
  for (const int signal : kForwarded) sigaddset(&blocked, signal);
  sigprocmask(SIG_BLOCK, &blocked, &before);  // until there is a child to forward to
  const pid_t parent = getpid();
  // A server must not get a signal to the group (timeout, a shell's kill) twice: the second one aborts it. A program that reads
  // a terminal stays in the terminal's group.
  own_group = isatty(STDIN_FILENO) == 0;
  const pid_t child = fork();
  if (child == 0) {
    if (own_group) setpgid(0, 0);  // here and in the parent: whoever is first
    sigprocmask(SIG_SETMASK, &before, nullptr);
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // a killed wrapper must not leave a server behind
    if (getppid() != parent) _exit(127);
    execv(program.c_str(), argv.data());
    const int error = errno;
    const ssize_t written = write(report[1], &error, sizeof error);
    _exit(written == sizeof error ? 127 : 126);
  }
  if (child < 0) fail("{} cannot be started: {}", program.string(), std::strerror(errno));
  if (own_group) setpgid(child, child);
  child_process = child;
  struct sigaction action {};
  action.sa_sigaction = forward;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  action.sa_mask = blocked;
  for (const int signal : kForwarded) sigaction(signal, &action, nullptr);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  close(report[1]);
  int error = 0;
  const ssize_t got = read(report[0], &error, sizeof error);
  close(report[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  child_process = 0;
  if (got == sizeof error) fail("{} cannot be started: {}", program.string(), std::strerror(error));
  return status;
}

void set(const std::string& name, const std::string& value) { setenv(name.c_str(), value.c_str(), 1); }

// Our own temporary file for the counters, unless the user named one.
class StatsFile {
 public:
  explicit StatsFile(const std::string& named) : path_(named), ours_(named.empty()) {
    if (!ours_) {
      check_writable(path_);
      if (fs::is_regular_file(path_)) fs::remove(path_);  // what is read afterwards is of this run
      return;
    }
    std::string pattern = (fs::temp_directory_path() / "oscar-stats-XXXXXX").string();
    const int file = mkstemp(pattern.data());
    if (file < 0) fail("no temporary file {}: {}", pattern, std::strerror(errno));
    close(file);
    path_ = pattern;
  }
  ~StatsFile() {
    if (ours_) unlink(path_.c_str());
  }
  StatsFile(const StatsFile&) = delete;
  StatsFile& operator=(const StatsFile&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] nlohmann::json read() const {  // null: nothing was written
    std::ifstream stream(path_);
    const std::string text((std::istreambuf_iterator<char>(stream)), {});
    return text.empty() ? nlohmann::json() : nlohmann::json::parse(text, nullptr, false);
  }

 private:
  std::string path_;
  bool ours_;
};

std::uint64_t count(const nlohmann::json& stats, const char* key) {
  const auto found = stats.find(key);
  return found != stats.end() && found->is_number() ? found->get<std::uint64_t>() : 0;
}

// One line about what happened; the exit code it deserves (kOk: the program's own).
int verdict(const nlohmann::json& stats, const std::string& program, const HostArguments& host, bool failed, bool strict) {
  if (!stats.is_object()) {
    if (host.only_asks || failed) return kOk;
    fmt::print(stderr,
               "oscar: {} ran WITHOUT OSCAR: the plug-in was never loaded (is it a llama.cpp program with shared libraries?)\n",
               program);
    return kNotServed;
  }
  const std::uint64_t served = count(stats, "attention_served") + count(stats, "attention_delegated"),
                      bypassed = count(stats, "attention_bypassed");
  const std::string refused =
      stats.contains("refused") && stats["refused"].is_string() ? stats["refused"].get<std::string>() : "";
  if (!refused.empty()) {
    fmt::print(stderr, "oscar: {} {}: {}\n", program, failed && strict ? "was ended by OSCAR" : "ran WITHOUT OSCAR", refused);
    return host.only_asks || failed ? kOk : kNotServed;
  }
  std::uint64_t resident = 0, nominal = 0;
  for (const auto& cache : stats.value("caches", nlohmann::json::array())) {
    resident += count(cache, "resident_bytes") + count(cache, "nominal_resident_bytes");
    nominal += count(cache, "nominal_bytes");
  }
  if (bypassed > 0) {
    fmt::print(
        stderr,
        "oscar: {} attention operations served, {} BYPASSED (they read llama.cpp's own cache): results are not OSCAR's\n",
        served, bypassed);
    return strict ? kNotServed : kOk;
  }
  if (served == 0) {
    const bool attended = count(stats, "graphs") > 0 && !stats.value("caches", nlohmann::json::array()).empty();
    fmt::print(stderr, "oscar: plug-in loaded, no attention operation ran in {}\n", program);
    return attended && strict && !failed ? kNotServed : kOk;
  }
  fmt::print(stderr, "oscar: {} attention operations served, 0 bypassed; KV cache {:.2f} MiB resident, {:.2f} MiB at 16 bit\n",
             served, static_cast<double>(resident) / 1048576.0, static_cast<double>(nominal) / 1048576.0);
  return kOk;
}

int execute(const ExecOptions& options, std::vector<std::string> args) {
  if (args.empty()) {
    fmt::print(stderr, "oscar: error: exec needs a program after --, for example: oscar exec -- llama-server -m model.gguf\n");
    return kUsage;
  }
  check(options.settings);
  const HostArguments host = read_arguments(args);
  const fs::path program = find_program(args[0]);
  const std::string name = program.filename().string();
  if (options.settings.mode == "stock" || options.settings.mode == "off") {
    fail("--mode stock would run {} without OSCAR: start it directly instead", name);
  }
  check_program(examine(program));
  std::string artifact = options.settings.artifact;
  if (!host.model.empty() && !host.only_asks) {
    artifact = resolve_artifact(options.settings, host.model);
  } else if (!artifact.empty()) {
    artifact = fs::absolute(artifact).string();
  }
  const std::string plugin = find_plugin().string();
  const StatsFile stats(options.stats);
  const bool strict = !options.no_strict;

  for (const auto& [key, value] : plugin_environment(options.settings, artifact)) set(key, value);
  set("OSCAR_STRICT", strict ? "1" : "0");
  set("OSCAR_STATS", fs::absolute(stats.path()).string());
  // A program built with GGML_BACKEND_DL loads GGML_BACKEND_PATH; the others need LD_PRELOAD. Loading twice is harmless, so
  // both.
  if (environment("GGML_BACKEND_PATH").empty()) set("GGML_BACKEND_PATH", plugin);
  const std::string preload = environment("LD_PRELOAD");
  set("LD_PRELOAD", preload.empty() ? plugin : plugin + ":" + preload);
  std::string notes;
  if (host.flash_attention.empty()) {
    set("LLAMA_ARG_FLASH_ATTN", "on");  // llama.cpp's twin of -fa on: no unknown flag for programs that have none
    if (name.rfind("llama-bench", 0) == 0) args.insert(args.end(), {"-fa", "on"});  // reads no environment
    notes += " -fa on";
  }
  if (name.rfind("llama-server", 0) == 0) {
    if (host.cache_ram.empty()) {
      set("LLAMA_ARG_CACHE_RAM", "0");
      notes += " --cache-ram 0";
    } else if (host.cache_ram != "0") {
      fmt::print(stderr,
                 "oscar: warning: --cache-ram {} copies idle slots to RAM as 16-bit rows, outside the 2-bit cache; --cache-ram "
                 "0 turns it off\n",
                 host.cache_ram);
    }
  }
  if (!notes.empty()) fmt::print(stderr, "oscar: {} runs with{}\n", name, notes);

  const int status = run_child(program, args);
  const bool signalled = WIFSIGNALED(status);
  const int code = signalled ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (signalled) {
    const int signal = WTERMSIG(status);
    fmt::print(stderr, "oscar: {} was ended by signal {} ({}){}\n", name, signal, strsignal(signal),
               WCOREDUMP(status) ? ", core dumped" : "");
  }
  const int judged = verdict(stats.read(), name, host, code != 0, strict);
  return code == 0 ? judged : code;
}

}  // namespace

void add_exec(CommandLine& line) {
  Command& command = line.add("exec", "run any stock llama.cpp program with its KV cache in 2 bits");
  const auto options = std::make_shared<ExecOptions>();
  command.usage("[options] -- PROGRAM [ARGUMENTS]");
  command.text(
      "Starts the program with the plug-in loaded (GGML_BACKEND_PATH and LD_PRELOAD), finds the artifact of the model it is "
      "given with -m, "
      "turns flash attention on, and for llama-server turns --cache-ram off (it would keep 16-bit copies of idle slots). "
      "Arguments that "
      "cannot work (-ctk, -ctv other than f16, -fa off) and programs no plug-in can reach (static ones) are refused with the "
      "reason.");
  command.text(
      "Signals are passed on; the exit code is the program's, or 3 when attention was not served by OSCAR. A line on stderr "
      "says how many "
      "operations were served and what the cache takes.");
  command.text(
      "A second model in the program (a draft, -md) needs an artifact of its own beside it. States and slots that OSCAR saved "
      "hold "
      "2-bit rows: they load under the same artifact and rates only, and a program without OSCAR cannot tell that it cannot "
      "read "
      "them.");
  add_settings(command, options->settings, true);
  command.flag("--no-strict", options->no_strict,
               "keep going when an attention operation cannot be served (reported all the same)");
  command.option("--stats-json", options->stats, "FILE", "keep the plug-in's counters here", "OSCAR_STATS");
  command.example("oscar exec -- llama-server -m model.gguf -c 32768", "an OpenAI-compatible server on a 2-bit cache");
  command.example("oscar exec --mode exact -- llama-perplexity -m model.gguf -f text.txt",
                  "the same path with 16-bit rows, as a baseline");
  command.action([options, &line] {
    if (!kWithLlama) requires_llama("exec");
    return execute(*options, line.rest());
  });
}

}  // namespace oscar::cli
