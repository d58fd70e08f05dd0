//! Real guests in seconds: an appliance built from the distribution's kernel and busybox, booted by User-Mode Linux or QEMU.
