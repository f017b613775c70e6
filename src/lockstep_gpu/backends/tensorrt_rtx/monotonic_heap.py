"""A heap of fixed addresses, which increase with each allocation.

TensorRT-RTX numbers some of an engine's values in the order of their addresses. The C library's heap reuses freed
memory, at addresses that the kernel randomizes, so that two builds of one graph differ in a few of these numbers. On
this heap the order of addresses is the order of allocations, which only the library's code decides: the same bytes in
every process, Python and machine.

In: nothing. Out: a shared object for LD_PRELOAD, x86-64 and Linux, with the allocator in 256 bytes of machine code,
listed below with its assembly in Intel's notation. Nothing is freed: it is for a process that builds some engines and
ends.
"""

from __future__ import annotations

import struct

# `top` is the first free address; 0 before the first allocation, which maps 128 GiB at 0x100000000000 without reserving
# memory for them. Each allocation is preceded by its size. Threads may allocate at once.
_LISTING = """
malloc:
    be10000000            mov esi,0x10
take:
    488b05f4100000        mov rax,[top]
    4885c0                test rax,rax
    7540                  jne taken
    57                    push rdi
    56                    push rsi
    b809000000            mov eax,0x9
    48bf0000000000100000  movabs rdi,0x100000000000
    48be0000000020000000  movabs rsi,0x2000000000
    ba03000000            mov edx,0x3
    41ba22400000          mov r10d,0x4022
    49c7c0ffffffff        mov r8,0xffffffffffffffff
    4531c9                xor r9d,r9d
    0f05                  syscall
    5e                    pop rsi
    5f                    pop rdi
    4885c0                test rax,rax
    7829                  js none
    488905af100000        mov [top],rax
taken:
    488d44371f            lea rax,[rdi+rsi+0x1f]
    4883e0f0              and rax,0xfffffffffffffff0
    f0480fc1059d100000    lock xadd [top],rax
    488d44300f            lea rax,[rax+rsi+0xf]
    48f7de                neg rsi
    4821f0                and rax,rsi
    488978f8              mov [rax-0x8],rdi
    c3                    ret
none:
    31c0                  xor eax,eax
free:
    c3                    ret
calloc:
    4889f8                mov rax,rdi
    48f7e6                mul rsi
    70f5                  jo none
    4889c7                mov rdi,rax
    e97affffff            jmp malloc
realloc:
    4885ff                test rdi,rdi
    7508                  jne again
    4889f7                mov rdi,rsi
    e96dffffff            jmp malloc
again:
    488b4ff8              mov rcx,[rdi-0x8]
    4889f8                mov rax,rdi
    4839ce                cmp rsi,rcx
    76d6                  jbe free
    57                    push rdi
    51                    push rcx
    4889f7                mov rdi,rsi
    e857ffffff            call malloc
    59                    pop rcx
    5e                    pop rsi
    4885c0                test rax,rax
    74c5                  je free
    4889c7                mov rdi,rax
    f3a4                  rep movsb
    c3                    ret
memalign:
    4887f7                xchg rdi,rsi
    4883fe10              cmp rsi,0x10
    0f8342ffffff          jae take
    e938ffffff            jmp malloc
posix_memalign:
    57                    push rdi
    4889d7                mov rdi,rdx
    e812000000            call pm
    5f                    pop rdi
    4885c0                test rax,rax
    7406                  je full
    488907                mov [rdi],rax
    31c0                  xor eax,eax
    c3                    ret
full:
    b80c000000            mov eax,0xc
    c3                    ret
pm:
    4883fe10              cmp rsi,0x10
    0f8318ffffff          jae take
    e90effffff            jmp malloc
malloc_usable_size:
    4885ff                test rdi,rdi
    0f8478ffffff          je none
    488b47f8              mov rax,[rdi-0x8]
    c3                    ret
"""
# Of the addresses.
FIRST = 0x100000000000
LAST = FIRST + 0x2000000000
_EXPORTED = ("malloc", "free", "calloc", "realloc", "memalign", "aligned_alloc", "posix_memalign", "malloc_usable_size")
_SAME = {"aligned_alloc": "memalign"}

# Offsets in the file and in memory: read-only code and data, then writable data on another page. The code expects
# `top` 0x1100 bytes after its first instruction.
_TEXT = 0x400
_DYNAMIC = 0x1000
_TOP = _TEXT + 0x1100
# bytes of an ELF header, a program header and a symbol
_HEADER = 64
_PROGRAM = 56
_SYMBOL = 24
_READ_RUN = 5
_READ_WRITE = 6


def shared_object() -> bytes:
    """Return the ELF file (System V ABI, generic and AMD64)."""
    code, labels = _assemble()
    names = b"\0"
    offsets = {}
    for name in _EXPORTED:
        offsets[name] = len(names)
        names += name.encode() + b"\0"
    symbols = bytes(_SYMBOL)
    for name in _EXPORTED:  # global functions of section 1, which only says that they are defined
        symbols += struct.pack("<IBBHQQ", offsets[name], 0x12, 0, 1, _TEXT + labels[_SAME.get(name, name)], 0)
    count = len(_EXPORTED) + 1
    # One bucket, in which each symbol leads to the next.
    table = struct.pack(f"<{3 + count}I", 1, count, count - 1, 0, *range(count - 1))
    start = _HEADER + 4 * _PROGRAM
    table_offset = start + len(symbols)
    names_offset = table_offset + len(table)
    tags = {6: start, 11: _SYMBOL, 4: table_offset, 5: names_offset, 10: len(names), 0: 0}
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in tags.items())
    head = _headers(_TEXT + len(code), _TOP + 8 - _DYNAMIC, len(dynamic)) + symbols + table + names
    assert len(head) <= _TEXT and _TEXT + len(code) <= _DYNAMIC
    file = head.ljust(_TEXT, b"\0") + code
    return (file.ljust(_DYNAMIC, b"\0") + dynamic).ljust(_TOP + 8, b"\0")


def _assemble() -> tuple[bytes, dict[str, int]]:
    """Return the listing's machine code, and the offset of each label."""
    code = b""
    labels = {}
    for line in _LISTING.split("\n"):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line:
            code += bytes.fromhex(line.split()[0])
    return code, labels


def _headers(run: int, written: int, dynamic: int) -> bytes:
    """Return the ELF header, without sections, and headers of two loaded parts, dynamic section and stack."""
    elf = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    elf += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM, 4, 0, 0, 0)
    load = 1
    dynamic_part = 2
    stack = 0x6474E551
    for kind, flags, at, size, align in (
        (load, _READ_RUN, 0, run, 0x1000),
        (load, _READ_WRITE, _DYNAMIC, written, 0x1000),
        (dynamic_part, _READ_WRITE, _DYNAMIC, dynamic, 8),
        (stack, _READ_WRITE, 0, 0, 16),
    ):
        elf += struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, align)
    return elf
