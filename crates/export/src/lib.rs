//! The wires a virtual block device is served over: NBD and vhost-user-blk.
