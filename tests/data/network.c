/* Preloaded (LD_PRELOAD) into every process of a test: each name looked up and each internet address called is written to the file
   $LOCKSTEP_NETWORK_LOG, a line each, and refused. It stands before libc, so it sees native code too, as long as that calls libc. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void record(const char *call, const char *what) {
    char line[1024], program[256] = "?";
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        ssize_t size = read(file, program, sizeof program - 1);
        close(file);
        for (ssize_t i = 0; i < size; i++)
            if (program[i] == 0 || program[i] == '\n') program[i] = ' ';
        program[size > 0 ? size : 0] = 0;
    }
    int length = snprintf(line, sizeof line, "%s %s: %s\n", call, what, program);
    if (length >= (int)sizeof line) line[length = sizeof line - 1] = '\n';
    const char *path = getenv("LOCKSTEP_NETWORK_LOG");
    int log = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (log < 0 || write(log, line, length) != length) abort(); /* a record that is lost would let a test pass */
    close(log);
}

/* 1 where `address` is one of the internet; it is recorded then. */
static int refused(const char *call, const struct sockaddr *address) {
    char host[INET6_ADDRSTRLEN] = "?", what[128];
    int port = 0;
    if (address == NULL) return 0;
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        port = ntohs(in->sin_port);
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)address;
        inet_ntop(AF_INET6, &in->sin6_addr, host, sizeof host);
        port = ntohs(in->sin6_port);
    } else {
        return 0;
    }
    snprintf(what, sizeof what, "%s port %d", host, port);
    record(call, what);
    errno = ENETUNREACH;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int connect(int socket, const struct sockaddr *address, socklen_t length) {
    return refused("connect", address) ? -1 : REAL(connect)(socket, address, length);
}

ssize_t sendto(int socket, const void *data, size_t size, int flags, const struct sockaddr *address, socklen_t length) {
    return refused("sendto", address) ? -1 : REAL(sendto)(socket, data, size, flags, address, length);
}

ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    return refused("sendmsg", message->msg_name) ? -1 : REAL(sendmsg)(socket, message, flags);
}

int sendmmsg(int socket, struct mmsghdr *messages, unsigned int count, int flags) {
    for (unsigned int i = 0; i < count; i++)
        if (refused("sendmmsg", messages[i].msg_hdr.msg_name)) return -1;
    return REAL(sendmmsg)(socket, messages, count, flags);
}

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    (void)service, (void)hints, (void)found;
    record("getaddrinfo", host ? host : "(this machine)");
    return EAI_AGAIN;
}

static struct hostent *no_host(const char *call, const char *host) {
    record(call, host);
    h_errno = TRY_AGAIN;
    return NULL;
}

struct hostent *gethostbyname(const char *host) { return no_host("gethostbyname", host); }

struct hostent *gethostbyname2(const char *host, int family) {
    (void)family;
    return no_host("gethostbyname2", host);
}

struct hostent *gethostbyaddr(const void *address, socklen_t length, int family) {
    (void)address, (void)length, (void)family;
    return no_host("gethostbyaddr", "(an address)");
}

static int no_host_r(const char *call, const char *host, struct hostent **result, int *error) {
    record(call, host);
    *result = NULL;
    *error = TRY_AGAIN;
    return EAGAIN;
}

int gethostbyname_r(const char *host, struct hostent *entry, char *buffer, size_t size, struct hostent **result, int *error) {
    (void)entry, (void)buffer, (void)size;
    return no_host_r("gethostbyname_r", host, result, error);
}

int gethostbyname2_r(const char *host, int family, struct hostent *entry, char *buffer, size_t size, struct hostent **result, int *error) {
    (void)family, (void)entry, (void)buffer, (void)size;
    return no_host_r("gethostbyname2_r", host, result, error);
}

int gethostbyaddr_r(const void *address, socklen_t length, int family, struct hostent *entry, char *buffer, size_t size, struct hostent **result, int *error) {
    (void)address, (void)length, (void)family, (void)entry, (void)buffer, (void)size;
    return no_host_r("gethostbyaddr_r", "(an address)", result, error);
}
