//! Connections that are looked for while nobody waits in them: each attempt has a thread of its own.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_io::Event;

use super::Nbd;
use super::dial::{Connection, LIMIT, credentials, dial};

/// Between two attempts: at first, and at most.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);
/// The least that one attempt may take, however little patience is left.
const LEAST: Duration = Duration::from_secs(1);

/// What came of it.
pub(super) enum News {
    /// There is one.
    Connected(Box<Connection>),
    /// None came in the time that requests wait; it is tried on, and told again with each attempt.
    TooLong(String),
    /// The store was closed.
    Closed,
}

/// The wish for a connection. It ends when it is dropped.
pub(super) struct Attempt {
    news: Mutex<VecDeque<News>>,
    told: Event,
}

impl Attempt {
    /// For a connection that was lost then, and looked for so many times since.
    pub(super) fn start(nbd: Arc<Nbd>, since: Instant, times: u32) -> Arc<Attempt> {
        let attempt = Arc::new(Attempt { news: Mutex::default(), told: Event::default() });
        #[cfg(test)]
        if let Some(wishes) = &nbd.wishes {
            wishes.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&attempt));
            return attempt;
        }
        let (wish, copy) = (Arc::downgrade(&attempt), nbd.clone());
        let spawned = thread::Builder::new()
            .name("nbd connect".into())
            .spawn(move || seek(&copy, &wish, since, times));
        if let Err(error) = spawned {
            attempt.tell(News::TooLong(format!("cannot start a thread: {error}")));
        }
        attempt
    }

    pub(super) async fn next(&self) -> News {
        loop {
            let told = self.told.listen();
            if let Some(news) = self.news().pop_front() {
                return news;
            }
            told.await;
        }
    }

    fn news(&self) -> MutexGuard<'_, VecDeque<News>> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, news: News) {
        self.news().push_back(news);
        self.told.notify();
    }
}

fn seek(nbd: &Arc<Nbd>, wish: &Weak<Attempt>, begun: Instant, times: u32) {
    let patience = nbd.uri.reconnect.unwrap_or(LIMIT);
    // The server takes connections and breaks them.
    if times > 1 {
        nbd.pause((PAUSE * 2u32.pow(times.min(6))).min(LONGEST));
    }
    let (mut pause, mut told) = (PAUSE, false);
    loop {
        // Requests of a connection that was lost do not wait longer than they may because one attempt does.
        let left = if told || times == 0 {
            LIMIT
        } else {
            patience.saturating_sub(begun.elapsed()).max(LEAST)
        };
        let found = if nbd.is_closed() { None } else { Some(attempt(nbd, left.min(LIMIT))) };
        let Some(wish) = wish.upgrade() else { return };
        match found {
            None => return wish.tell(News::Closed),
            Some(Ok(connection)) => return wish.tell(News::Connected(Box::new(connection))),
            Some(Err(why)) if begun.elapsed() >= patience => {
                told = true;
                wish.tell(News::TooLong(why));
            }
            Some(Err(_)) => {}
        }
        drop(wish);
        nbd.pause(pause);
        pause = (pause * 2).min(LONGEST);
    }
}

fn attempt(nbd: &Nbd, limit: Duration) -> Result<Connection, String> {
    // Certificates may be others by now. Where they are just being replaced, or out of reach, those of opening are tried.
    let tls = credentials(&nbd.uri).unwrap_or_else(|error| {
        tracing::debug!("{}: {error}", nbd.uri);
        nbd.tls.clone()
    });
    let connection =
        dial(&nbd.uri, tls.as_ref(), &nbd.status, limit).map_err(|error| error.to_string())?;
    *nbd.lies_in.lock().unwrap_or_else(PoisonError::into_inner) = connection.lies_in.clone();
    connection.agreed.goes_on_from(&nbd.agreed)?;
    Ok(connection)
}
