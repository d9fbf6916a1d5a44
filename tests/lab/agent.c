/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Runs commands in the lab's first-level machine for the driver (lab.py).
 * usage: agent PORT      returns when it listens, and serves in the background
 *
 * One connection is one command. The driver sends two strings, each after its
 * length (32 bits, big endian): the command for /bin/sh, and its standard input.
 * Back come messages of a letter, a length and that many bytes: 'O' is output
 * (standard output and error together), 'X' is the exit status in decimal, and
 * the last. If the driver closes its side of the connection, the command's session is
 * killed; when that has been done, the connection ends.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static char *read_string(FILE *driver, uint32_t *len)
{
    char *s = NULL;

    if (fread(len, sizeof(*len), 1, driver)) {
        *len = ntohl(*len);
        s = calloc(*len + 1, 1);
    }
    if (!s || fread(s, 1, *len, driver) != *len) {
        exit(1);
    }
    return s;
}

/* After an error, poll() shows that the connection is gone. */
static void message(FILE *driver, char type, const char *data, uint32_t len)
{
    uint32_t be = htonl(len);

    fputc(type, driver);
    fwrite(&be, sizeof(be), 1, driver);
    fwrite(data, 1, len, driver);
    fflush(driver);
}

/* Pass on what is in the pipe; false at its end. */
static int output(FILE *driver, int out)
{
    static char buf[65536];
    ssize_t n = read(out, buf, sizeof(buf));

    if (n > 0) {
        message(driver, 'O', buf, n);
    }
    return n > 0;
}

static void serve(int conn)
{
    FILE *from = fdopen(conn, "r"), *to = fdopen(conn, "w");
    uint32_t cmd_len, in_len;
    char *cmd = read_string(from, &cmd_len);
    char *in = read_string(from, &in_len);
    int in_fd = memfd_create("stdin", MFD_CLOEXEC);
    int out[2];

    if (in_fd < 0 || pipe2(out, O_CLOEXEC) < 0 || write(in_fd, in, in_len) != in_len) {
        exit(1);
    }
    lseek(in_fd, 0, SEEK_SET);

    pid_t pid = fork();
    if (pid < 0) {
        exit(1);
    }
    if (!pid) {
        setsid();
        signal(SIGPIPE, SIG_DFL);
        signal(SIGCHLD, SIG_DFL);
        dup2(in_fd, 0);
        dup2(out[1], 1);
        dup2(out[1], 2);
        execl("/bin/sh", "sh", "-c", cmd, NULL);
        _exit(127);
    }
    close(out[1]);

    struct pollfd fds[] = {
        { .fd = pidfd_open(pid, 0), .events = POLLIN },
        { .fd = out[0], .events = POLLIN },
        { .fd = conn, .events = POLLRDHUP },
    };
    for (;;) {
        if (poll(fds, 3, -1) < 0) {
            continue;
        }
        if (fds[2].revents) {
            kill(-pid, SIGKILL);
            waitpid(pid, NULL, 0); /* its ports and files are free when we end */
            exit(0);
        }
        if (fds[1].revents && !output(to, out[0])) {
            fds[1].fd = -1;
        }
        if (fds[0].revents) {
            break;
        }
    }
    /* What the command left running may hold the pipe open: do not wait for it. */
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    while (output(to, out[0])) {
    }
    int status;
    waitpid(pid, &status, 0);
    char text[16];
    snprintf(text, sizeof(text), "%d",
             WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    message(to, 'X', text, strlen(text));
    shutdown(conn, SHUT_WR);
    exit(0);
}

int main(int argc, char **argv)
{
    struct sockaddr_in addr = {
        .sin_family = AF_INET,
        .sin_port = htons(argc == 2 ? atoi(argv[1]) : 0),
    };
    int one = 1;
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(s, (void *)&addr, sizeof(addr)) < 0 || listen(s, 64) < 0) {
        err(1, "agent: cannot listen");
    }
    if (daemon(1, 1) < 0) {
        err(1, "agent: daemon");
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
        int conn = accept4(s, NULL, NULL, SOCK_CLOEXEC);

        if (conn < 0) {
            continue;
        }
        if (!fork()) {
            signal(SIGCHLD, SIG_DFL);
            serve(conn);
        }
        close(conn);
    }
}
