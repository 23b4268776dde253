package interop;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.messaging.MessagingService;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.service.MessagingServices;
import co.cask.cdap.messaging.store.leveldb.LevelDbStore;
import co.cask.cdap.proto.id.TopicId;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.iq80.leveldb.DBIterator;

/** CDAP's cleaning with its duration, and large stores that it can clean. */
final class Pruning {
  private static final int TTL_SECONDS = (int) TimeUnit.DAYS.toSeconds(1);
  private static final int BATCH = 1000;

  private Pruning() {
  }

  /** Runs {@code prune DIR}: one run of the cleanup thread at the given time. */
  static void prune(Arguments args, Output out) throws IOException {
    long nowMs = args.number("--now", System.currentTimeMillis());
    try (LevelDbStore store = new LevelDbStore(Main.configuration(args.word(0)))) {
      // The count also warms up caches and the compiler, so the duration is CDAP's best.
      long messages = count(store, "message");
      long payloads = count(store, "payload");
      long begin = System.nanoTime();
      store.prune(nowMs);
      double seconds = (System.nanoTime() - begin) / 1e9;
      long messagesDeleted = messages - count(store, "message");
      long payloadsDeleted = payloads - count(store, "payload");
      out.line("now_ms", nowMs, "message_rows", messages, "payload_rows", payloads,
          "messages_deleted", messagesDeleted, "payloads_deleted", payloadsDeleted,
          "deleted", messagesDeleted + payloadsDeleted, "seconds", seconds);
    }
  }

  private static long count(LevelDbStore store, String table) throws IOException {
    long count = 0;
    try (DBIterator rows = store.database(table).iterator()) {
      for (rows.seekToFirst(); rows.hasNext(); rows.next()) {
        count++;
      }
    }
    return count;
  }

  /**
   * Runs {@code fill DIR}: plain messages evenly over two days in topics with a ttl of one day, in the first generation
   * because CDAP prunes no other. Half of the rows are expired, exactly half if a topic's rows fill pairs of batches.
   */
  static void fill(Arguments args, Output out) throws Exception {
    long nowMs = args.number("--now", System.currentTimeMillis());
    int topics = (int) args.number("--topics", 10);
    long rowsPerTopic = args.number("--rows", 1_000_000) / topics;
    int payloadBytes = (int) args.number("--payload-bytes", 100);
    CConfiguration conf = Main.configuration(args.word(0));
    AtomicLong clock = new AtomicLong();
    LevelDbStore store = new LevelDbStore(conf);
    MessagingService service = MessagingServices.create(conf, store, clock::get);
    for (int i = 0; i < topics; i++) {
      TopicId topic = new TopicId("default", "bulk-" + i);
      service.createTopic(new TopicMetadata(topic, "ttl", Integer.toString(TTL_SECONDS)));
      fillTopic(service, topic, rowsPerTopic, payloadBytes, nowMs, clock, new Random(i));
    }
    out.line("rows", rowsPerTopic * topics, "topics", topics, "now_ms", nowMs, "ttl_seconds", TTL_SECONDS);
    out.flush();
    if (args.has("--kill")) {
      Runtime.getRuntime().halt(0);
    }
    store.close();
  }

  private static void fillTopic(MessagingService service, TopicId topic, long rows, int payloadBytes, long nowMs,
      AtomicLong clock, Random random) throws Exception {
    long pastMs = TimeUnit.SECONDS.toMillis(2L * TTL_SECONDS);
    for (long done = 0; done < rows; done += BATCH) {
      List<byte[]> batch = new ArrayList<>(BATCH);
      for (long i = done; i < Math.min(done + BATCH, rows); i++) {
        byte[] payload = new byte[payloadBytes];
        random.nextBytes(payload);
        batch.add(payload);
      }
      clock.set(nowMs - pastMs + pastMs * done / rows);
      service.publish(Batch.plain(topic, batch));
    }
  }
}
