package interop;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.messaging.MessagingService;
import co.cask.cdap.messaging.RollbackDetail;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.service.MessagingServices;
import co.cask.cdap.proto.id.TopicId;
import interop.Transactions.Outcome;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import org.apache.tephra.persist.TransactionSnapshot;

/**
 * A store like after years of CDAP, from a seed: existing, deleted and recreated topics, messages on both sides of
 * every limit, and transactions of every outcome. The same arguments give the same rows.
 */
final class RandomStore {
  /** Neighbors in key order: names that are prefixes of each other, also across the colon. */
  private static final List<TopicId> NAMES = List.of(
      new TopicId("default", "t"), new TopicId("default", "t1"), new TopicId("default", "t-1"),
      new TopicId("system", "audit"), new TopicId("ns1", "t"), new TopicId("ns", "1t"));
  private static final int[] TTL_SECONDS = {60, 3600, 86400, 604800, 315360000, Integer.MAX_VALUE};
  private static final long LONGEST_PAST_MS = TimeUnit.DAYS.toMillis(60);
  private static final long MAX_TX_AGE_MS = TimeUnit.HOURS.toMillis(25);

  private final Random random;
  private final long nowMs;
  private final int payloadBytes;
  private final MessagingService service;
  private final Transactions transactions;
  private final Output out;
  private long clockMs;
  private int largestBatch;
  private Tally messages;
  private Tally payloads;
  private long references;

  private RandomStore(long seed, long nowMs, int payloadBytes, CConfiguration conf, Store store,
      Transactions transactions, Output out) {
    this.random = new Random(seed);
    this.nowMs = nowMs;
    this.payloadBytes = payloadBytes;
    this.service = MessagingServices.create(conf, store, () -> clockMs);
    this.transactions = transactions;
    this.out = out;
  }

  static void write(Arguments args, Output out) throws Exception {
    Path dir = Path.of(args.word(0));
    long seed = Long.parseLong(args.word(1));
    long nowMs = args.number("--now", System.currentTimeMillis());
    Transactions transactions = new Transactions(nowMs - TimeUnit.SECONDS.toMillis(30));
    CConfiguration conf = Main.configuration(dir.toString());
    Store store = Store.open(conf, args.word(0));
    new RandomStore(seed, nowMs, (int) args.number("--payload-bytes", 100), conf, store, transactions, out)
        .writeTopics((int) args.number("--topics", NAMES.size()), args.number("--rows", 2000));

    Path snapshots = Path.of(args.text("--snapshots", dir.toAbsolutePath().resolveSibling("tx.snapshot").toString()));
    Files.createDirectories(snapshots);
    TransactionSnapshot snapshot = transactions.snapshot();
    Path file = snapshots.resolve("snapshot." + snapshot.getTimestamp());
    Snapshots.write(file, snapshot);
    out.line("kind", "store", "now_ms", nowMs, "snapshot", file.toString(),
        "invalid", snapshot.getInvalid().size(), "in_progress", snapshot.getInProgress().size());
    out.flush();
    if (args.has("--kill")) {
      // No shutdown hook and no close, like in a crash.
      Runtime.getRuntime().halt(0);
    }
    store.close();
  }

  private void writeTopics(int topics, long rows) throws Exception {
    largestBatch = (int) Math.max(20, rows / 500);
    for (int i = 0; i < topics; i++) {
      writeTopic(i < NAMES.size() ? NAMES.get(i) : new TopicId("ns1", "topic-" + i), rows / topics);
    }
  }

  private void writeTopic(TopicId topic, long rows) throws Exception {
    int ttlSeconds = TTL_SECONDS[random.nextInt(TTL_SECONDS.length)];
    int generations = random.nextBoolean() ? 1 : 2 + random.nextInt(3);
    long pastMs = Math.min(2 * TimeUnit.SECONDS.toMillis(ttlSeconds), LONGEST_PAST_MS);
    for (int generation = 1; generation <= generations; generation++) {
      // The clock stops at the last millisecond of a generation, where the next one starts.
      long fromMs = nowMs - pastMs + pastMs * (generation - 1) / generations;
      service.createTopic(new TopicMetadata(topic, "ttl", Integer.toString(ttlSeconds)));
      writeGeneration(topic, ttlSeconds, rows / generations, fromMs, pastMs / generations);
      boolean last = generation == generations;
      if (!last || random.nextInt(5) == 0) {
        service.deleteTopic(topic);
      }
      out.line("kind", "generation", "topic", Reading.name(topic), "generation", generation,
          "ttl_seconds", ttlSeconds, "messages", messages.rows(), "messages_checksum", messages.checksum(),
          "references", references, "payloads", payloads.rows(), "payloads_checksum", payloads.checksum());
    }
  }

  /** Writes about that many rows, evenly over the time, and messages right before, at and after the ttl. */
  private void writeGeneration(TopicId topic, int ttlSeconds, long rows, long fromMs, long lengthMs)
      throws Exception {
    messages = new Tally();
    payloads = new Tally();
    references = 0;
    long cutoffMs = nowMs - TimeUnit.SECONDS.toMillis(ttlSeconds);
    TreeSet<Long> edges = new TreeSet<>(List.of(cutoffMs - 1, cutoffMs, cutoffMs + 1));
    for (long written = 0; written < rows; written = messages.rows() + references + payloads.rows()) {
      long atMs = fromMs + lengthMs * written / rows;
      // The clock of the writer must not step back, because equal keys would overwrite each other.
      for (long edgeMs : edges.subSet(fromMs, atMs)) {
        clockMs = edgeMs;
        publish(Batch.plain(topic, batch(1)));
      }
      edges.headSet(atMs).clear();
      clockMs = atMs;
      if (random.nextInt(100) < 55) {
        publish(Batch.plain(topic, batch(1 + random.nextInt(largestBatch))));
      } else {
        writeTransaction(topic, ttlSeconds, atMs);
      }
    }
  }

  /** Writes one transaction that ends at the given time, in some cases with a checkpoint. */
  private void writeTransaction(TopicId topic, int ttlSeconds, long atMs) throws Exception {
    // Some transactions publish long after their begin, so that their payloads expire before their references.
    long longestMs = Math.min(2 * TimeUnit.SECONDS.toMillis(ttlSeconds), MAX_TX_AGE_MS);
    long beganMs = atMs - (random.nextInt(3) > 0 ? random.nextInt(1000) : random.nextLong(longestMs));
    List<Long> pointers = new ArrayList<>();
    pointers.add(transactions.pointer(beganMs));
    if (random.nextInt(5) == 0) {
      pointers.add(transactions.pointer(beganMs + (atMs - beganMs) / 2));
    }
    int what = random.nextInt(4);
    Outcome outcome = outcome(beganMs, what == 3);
    List<RollbackDetail> published = new ArrayList<>();
    for (long pointer : pointers) {
      if (what > 0) {
        store(topic, pointer, beganMs, atMs);
      }
      if (what == 1 || what == 2) {
        published.add(publish(Batch.transactional(topic, pointer, List.of())));
      }
      if (what == 0 || what == 2) {
        published.add(publish(Batch.transactional(topic, pointer, batch(1 + random.nextInt(largestBatch)))));
      }
      // 3: orphans, which are stored and never published.
    }
    if (outcome == Outcome.ROLLED_BACK) {
      for (RollbackDetail detail : published) {
        service.rollback(topic, detail);
      }
    }
    transactions.end(pointers, outcome);
  }

  private Outcome outcome(long beganMs, boolean orphan) {
    int die = random.nextInt(10);
    if (die < 6 && !orphan) {
      return Outcome.COMMITTED;
    }
    if (die % 3 == 0 && beganMs > nowMs - MAX_TX_AGE_MS) {
      return Outcome.IN_PROGRESS;
    }
    return die % 3 == 1 ? Outcome.ROLLED_BACK : Outcome.INVALID;
  }

  /** Sends one to three store requests between the begin of the transaction and its publish. */
  private void store(TopicId topic, long pointer, long beganMs, long atMs) throws Exception {
    int requests = 1 + random.nextInt(3);
    for (int i = 0; i < requests; i++) {
      clockMs = beganMs + (atMs - beganMs) * i / requests;
      List<byte[]> batch = batch(1 + random.nextInt(5));
      service.storePayload(Batch.transactional(topic, pointer, batch));
      batch.forEach(payloads::add);
    }
    clockMs = atMs;
  }

  private RollbackDetail publish(Batch request) throws Exception {
    RollbackDetail detail = service.publish(request);
    if (request.hasPayload()) {
      request.forEach(messages::add);
    } else {
      references++;
    }
    return detail;
  }

  /** Returns payloads with lengths from 0 to twice the mean, half of each random, so that Snappy compresses them. */
  private List<byte[]> batch(int size) {
    List<byte[]> batch = new ArrayList<>(size);
    for (int i = 0; i < size; i++) {
      byte[] payload = new byte[random.nextInt(2 * payloadBytes + 1)];
      for (int at = 0; at < payload.length / 2; at++) {
        payload[at] = (byte) random.nextInt(256);
      }
      batch.add(payload);
    }
    return batch;
  }
}
