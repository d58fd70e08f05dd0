//! Futures of one task that go on side by side.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;

/// Wait until all have ended.
pub(crate) async fn together<F: Future<Output = ()>>(all: impl Iterator<Item = F>) {
    let mut all: Vec<Pin<Box<F>>> = all.map(Box::pin).collect();
    poll_fn(|context| {
        all.retain_mut(|one| one.as_mut().poll(context).is_pending());
        if all.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Go on with `side` until `main` has ended.
pub(crate) async fn beside<T>(main: impl Future<Output = T>, side: impl Future<Output = ()>) -> T {
    let (mut main, mut side) = (pin!(main), pin!(side));
    let mut over = false;
    poll_fn(|context| {
        over = over || side.as_mut().poll(context).is_ready();
        main.as_mut().poll(context)
    })
    .await
}

/// What `main` gives, unless `limit` has ended before.
pub(crate) async fn within<T>(
    main: impl Future<Output = T>,
    limit: impl Future<Output = ()>,
) -> Option<T> {
    let (mut main, mut limit) = (pin!(main), pin!(limit));
    poll_fn(|context| match main.as_mut().poll(context) {
        Poll::Ready(end) => Poll::Ready(Some(end)),
        Poll::Pending => limit.as_mut().poll(context).map(|()| None),
    })
    .await
}
