/* Records the result of a power cut. Preloaded into the processes of a test (LD_PRELOAD), read by tests/power_cut.py.
 *
 * Every fsync and fdatasync of something below $POWER_ROOT appends one record to the file $POWER_LOG/log:
 *
 *     file ID CONTENT TREE    the content of this file is durable from here on; CONTENT is a copy of it in $POWER_LOG
 *     folder ID NAMES TREE    the names in this folder are durable from here on; NAMES lists them
 *
 * Each record ends with one more NAMES: every path below $POWER_ROOT at that moment, durable or not.
 * An ID names an inode permanently: device, number and time of birth; `root` is $POWER_ROOT itself. A line of NAMES is "KIND ID NAME\n", KIND being f or d.
 * The content is copied before the real call and recorded after it, under a lock that all processes share.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_int made;

static int identify(int folder, const char *name, int flags, char *id, size_t size) {
    struct statx found;
    if (statx(folder, name, flags | AT_SYMLINK_NOFOLLOW, STATX_TYPE | STATX_INO | STATX_BTIME, &found)) return 0;
    snprintf(id, size, "%u.%u.%llu.%lld.%u", found.stx_dev_major, found.stx_dev_minor, (unsigned long long)found.stx_ino,
             (long long)found.stx_btime.tv_sec, found.stx_btime.tv_nsec);
    return S_ISDIR(found.stx_mode) ? 'd' : S_ISREG(found.stx_mode) ? 'f' : 0;
}

static int create(const char *log, char *name, size_t size) {
    char path[PATH_MAX];
    snprintf(name, size, "%d-%d", getpid(), atomic_fetch_add(&made, 1));
    snprintf(path, sizeof path, "%s/%s", log, name);
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
}

static void list(int into, int folder, const char *above, int deep) {
    int mine = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *names = mine < 0 ? NULL : fdopendir(mine);
    if (!names) return;
    for (struct dirent *each; (each = readdir(names));) {
        char id[128], path[PATH_MAX];
        if (!strcmp(each->d_name, ".") || !strcmp(each->d_name, "..")) continue;
        int kind = identify(mine, each->d_name, 0, id, sizeof id);
        if (!kind) continue;
        snprintf(path, sizeof path, "%s%s", above, each->d_name);
        dprintf(into, "%c %s %s\n", kind, id, path);
        if (deep && kind == 'd') {
            int below = openat(mine, each->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            strncat(path, "/", sizeof path - strlen(path) - 1);
            if (below >= 0) {
                list(into, below, path, deep);
                close(below);
            }
        }
    }
    closedir(names);
}

/* Copies without opening a readable file again: closing another descriptor of it would drop SQLite locks. */
static void copy(int into, int file) {
    char buffer[65536], path[64];
    int readable = (fcntl(file, F_GETFL) & O_ACCMODE) != O_WRONLY;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int from = readable ? file : open(path, O_RDONLY | O_CLOEXEC);
    off_t at = 0;
    for (ssize_t got; (got = pread(from, buffer, sizeof buffer, at)) > 0; at += got)
        if (write(into, buffer, got) != got) abort();
    if (!readable) close(from);
}

static int record(const char *call, int file) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, call);
    const char *root = getenv("POWER_ROOT"), *log = getenv("POWER_LOG");
    char link[64], path[PATH_MAX] = "", id[128], name[64], tree[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (!root || !log || readlink(link, path, sizeof path - 1) < 0 || strncmp(path, root, strlen(root))) return real(file);
    int is_root = !strcmp(path, root);
    snprintf(path, sizeof path, "%s/log", log);
    int records = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (records < 0 || flock(records, LOCK_EX)) abort();
    int kind = identify(file, "", AT_EMPTY_PATH, id, sizeof id), into = create(log, name, sizeof name);
    if (is_root) strcpy(id, "root");
    if (kind == 'd')
        list(into, file, "", 0);
    else
        copy(into, file);
    close(into);
    int top = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC), all = create(log, tree, sizeof tree);
    list(all, top, "", 1);
    close(all);
    close(top);
    int answer = real(file), why = errno;
    if (!answer) dprintf(records, "%s %s %s %s\n", kind == 'd' ? "folder" : "file", id, name, tree);
    close(records);
    errno = why;
    return answer;
}

int fsync(int file) { return record("fsync", file); }
int fdatasync(int file) { return record("fdatasync", file); }
