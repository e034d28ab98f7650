// Findings, and the source lines behind machine addresses.
#include "report.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "state.h"

namespace emulator {
namespace {

constexpr int kMaxFindings = 20; // one bug tends to show at many places
constexpr char kSeparator = '\x1f';

struct Frame {
  std::string function, file;
  int line = 0;
};

std::string text;
int count = 0;
std::vector<std::string> seen;

// The function at an address of this library and those inlined into each other there, innermost first.
std::vector<Frame> symbolize(const void* pc) {
  std::vector<Frame> frames;
  Dl_info info;
  if (dladdr(pc, &info) == 0 || info.dli_fname == nullptr) return frames;
  const size_t offset = static_cast<size_t>(static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase));
  // binutils come with g++. It prints two lines a frame: the function, then file:line.
  const std::string command = format("addr2line -C -f -i -e '%s' 0x%zx 2>/dev/null", info.dli_fname, offset);
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return frames;
  std::string output;
  char chunk[512];
  while (const size_t n = fread(chunk, 1, sizeof chunk, pipe)) output.append(chunk, n);
  pclose(pipe);
  for (size_t at = 0; at < output.size();) {
    const size_t name_end = output.find('\n', at);
    if (name_end == std::string::npos) break;
    const size_t place_end = std::min(output.find('\n', name_end + 1), output.size());
    const std::string place = output.substr(name_end + 1, place_end - name_end - 1);
    const size_t colon = place.rfind(':');
    Frame frame{output.substr(at, name_end - at), place.substr(0, colon), 0};
    if (colon != std::string::npos) frame.line = atoi(place.c_str() + colon + 1);
    frames.push_back(frame);
    at = place_end + 1;
  }
  return frames;
}

// "void agoq::cuda::(anonymous namespace)::quantize_kernel<...>(Args)" without what does not tell kernels apart.
std::string short_name(std::string name) {
  int depth = 0;
  for (size_t i = name.size(); i-- > 0;) { // the parameter list: the last parentheses
    if (name[i] == ')') ++depth;
    if (name[i] == '(' && --depth == 0) {
      name.resize(i);
      break;
    }
  }
  const size_t angle = name.find('<');
  size_t start = name.rfind("::", angle);
  start = start == std::string::npos ? name.rfind(' ', angle) + 1 : start + 2;
  return name.substr(start);
}

std::string kernel_name() {
  static const void* kernel = nullptr;
  static std::string name;
  if (kernel == launch_state.config.kernel) return name;
  kernel = launch_state.config.kernel;
  const std::vector<Frame> frames = symbolize(kernel);
  name = frames.empty() ? "?" : short_name(frames.back().function);
  return name;
}

bool is_wrapper(const Frame& frame) { return frame.file.find("/emulator/include/") != std::string::npos; }

} // namespace

std::string format(const char* pattern, ...) {
  char buffer[1024];
  va_list args;
  va_start(args, pattern);
  vsnprintf(buffer, sizeof buffer, pattern, args);
  va_end(args);
  return buffer;
}

void report(const char* kind, const Where& where, const std::string& buffer, const std::string& message) {
  const std::string site_file = where.site.file == nullptr ? "" : where.site.file;
  const std::string key = format("%s %p %s:%d %s", kind, where.pc, site_file.c_str(), where.site.line, buffer.c_str());
  if (std::find(seen.begin(), seen.end(), key) != seen.end()) return;
  seen.push_back(key);
  if (++count > kMaxFindings) return;

  std::string file = site_file, callers;
  int line = where.site.line;
  if (where.pc != nullptr) {
    // The call-out returns behind the access, possibly to the next line's code: look one byte earlier.
    std::vector<Frame> frames = symbolize(static_cast<const char*>(where.pc) - 1);
    while (frames.size() > 1 && is_wrapper(frames.front())) frames.erase(frames.begin());
    if (!frames.empty()) {
      file = frames.front().file;
      line = frames.front().line;
      frames.erase(frames.begin());
    }
    for (const Frame& frame : frames)
      callers += format("%s%s:%d", callers.empty() ? "" : " < ", frame.file.c_str(), frame.line);
  }
  std::string block_text, thread_text;
  if (const Thread* thread = where.thread == nullptr ? current : where.thread; thread != nullptr) {
    const uint3 &b = block.index, &t = thread->index;
    block_text = format("%u,%u,%u", b.x, b.y, b.z);
    thread_text = format("%u,%u,%u", t.x, t.y, t.z);
  }
  const std::string fields[] = {kind,   kernel_name(), file,   std::to_string(line), block_text, thread_text,
                                buffer, message,       callers};
  for (const std::string& field : fields) text += field + kSeparator;
  text.back() = '\n';
}

void fail(const char* kind, const Where& where, const std::string& buffer, const std::string& message) {
  report(kind, where, buffer, message);
  abort_launch();
}

int findings_count() { return count; }
const char* findings_text() { return text.c_str(); }
void clear_findings() {
  text.clear();
  count = 0;
  seen.clear();
}

} // namespace emulator
