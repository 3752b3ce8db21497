// Anonymous files, and descriptors of processes, by raw system calls: an interpreter that was built against older
// headers has no functions for them. Linux only.
#include <cerrno>

#include "fxpar.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // the same on every architecture, like all system calls since Linux 5.1
#endif

namespace {

constexpr unsigned kCloseOnExec = 1;  // MFD_CLOEXEC

int descriptor_or_error(long result) { return result < 0 ? -errno : static_cast<int>(result); }

}  // namespace

int fxpar_memory_file(const char* name) { return descriptor_or_error(syscall(SYS_memfd_create, name, kCloseOnExec)); }

int fxpar_process_file(int pid) { return descriptor_or_error(syscall(SYS_pidfd_open, pid, 0)); }

#else

int fxpar_memory_file(const char*) { return -ENOSYS; }

int fxpar_process_file(int) { return -ENOSYS; }

#endif
